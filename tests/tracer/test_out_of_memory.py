"""Runs that end for want of memory: where, what was held, what would have fitted; the user's exception unchanged."""

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import lifetrace
from lifetrace.cli import main
from lifetrace.post_mortem import asked_bytes
from reference_model import R_SIZES


def run(path, *arguments):
    quick = ["--repeats", "1", "--no-report", "--out", str(path)]
    return CliRunner().invoke(main, ["run", *quick, *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """12 MB for the embedded model, whose weights take 11,020,160: its cache outgrows that in decode."""
    path = tmp_path_factory.mktemp("oom") / "t"
    result = run(path, "--memory-limit", "12MB", "--prompt-length", "8", "--max-new-tokens", "600")
    return result, path


def test_the_run_says_where_what_and_what_would_fit(failed):
    result, path = failed
    assert result.exit_code == 1
    text = " ".join(result.stderr.split())
    assert "Out of memory in the decode, step" in text
    assert "weights 11.0 MB" in text
    assert "--dtype bfloat16" in text
    assert "Traceback" not in result.output
    shown = CliRunner().invoke(main, ["show", str(path)])
    assert "This run ran out of memory" in shown.stdout
    assert "Out of memory in the decode" in shown.stdout


def test_what_was_held_adds_up_to_more_than_the_limit(failed):
    _, path = failed
    found = lifetrace.read_trace(path).meta["post_mortem"]
    assert found["held"]["weights"] == 2_755_008 * 4
    assert found["limit_bytes"] == 12_000_000
    assert sum(found["held"].values()) > 12_000_000
    assert sum(found["held"].values()) - found["asked_bytes"] <= 12_000_000
    assert found["module"].startswith("model.layers.")
    assert found["stage"] == "layer"


def test_the_longest_context_that_is_promised_fits_and_a_little_more_does_not(failed, tmp_path):
    """The context counts positions in the cache: a prompt of 8 and n new tokens come to n + 7."""
    _, path = failed
    context = lifetrace.read_trace(path).meta["post_mortem"]["would_fit"]["largest_context"]
    limited = ["--memory-limit", "12MB", "--prompt-length", "8", "--max-new-tokens"]
    assert run(tmp_path / "a", *limited, str(context - 7 - 10)).exit_code == 0
    assert run(tmp_path / "b", *limited, str(context - 7 + 30)).exit_code == 1


def test_a_batch_that_does_not_fit_fails_in_the_prefill(tmp_path):
    result = run(tmp_path / "t", "--memory-limit", "14MB", "--batch", "64", "--prompt-length", "32")
    assert result.exit_code == 1
    found = lifetrace.read_trace(tmp_path / "t").meta["post_mortem"]
    assert (found["phase"], found["step"]) == ("prefill", 0)
    batch = found["would_fit"]["largest_batch"]
    assert 1 <= batch < 64
    fits = run(tmp_path / "f", "--memory-limit", "14MB", "--batch", str(max(1, batch - 1)), "--prompt-length", "32")
    assert fits.exit_code == 0, fits.output


@pytest.mark.parametrize("size", ["0", "0GB", "x", "-5GB", "12"])
def test_an_absurd_limit_is_refused(tmp_path, size):
    result = run(tmp_path / "t", "--memory-limit", size)
    assert result.exit_code == 2
    assert "no amount of memory" in result.stderr


def test_a_limit_that_is_enough_changes_nothing(tmp_path):
    result = run(tmp_path / "t", "--memory-limit", "100MB", "--max-new-tokens", "3")
    assert result.exit_code == 0
    trace = lifetrace.read_trace(tmp_path / "t")
    assert trace.meta["status"] == "complete"
    assert trace.meta["post_mortem"] is None


def test_the_users_exception_goes_on_unchanged(model_r, prompt_12, tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of …")

    def refuse(*_):
        if len(seen) == 3:
            raise error
        seen.append(1)

    seen = []
    model_r.model.layers[2].mlp.register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError) as raised, lifetrace.trace(model_r, out=tmp_path / "t"):
        model_r.generate(prompt_12, max_new_tokens=8)
    assert raised.value is error
    trace = lifetrace.read_trace(tmp_path / "t")
    assert trace.meta["status"] == "oom"
    found = trace.meta["post_mortem"]
    assert (found["step"], found["phase"], found["layer"], found["part"]) == (3, "decode", 2, "mlp")
    assert found["module"] == "model.layers.2.mlp"
    assert found["asked_bytes"] == 20 * 2**20
    assert found["held"] == {"weights": 180_800 * 4, "kv": 14 * 4 * 2 * 32 * 4, "activations and other": None}


def test_a_process_with_a_limit_of_its_own_leaves_a_post_mortem(tmp_path):
    """A child that may address 600 MB more than it has asks for a batch of 4,000 sequences of 500 tokens."""
    source = f"""
import resource, torch, lifetrace
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(**{R_SIZES!r})).eval()
model.generate(torch.arange(3, 15)[None], max_new_tokens=2)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 600 * 2**20,) * 2)
try:
    with lifetrace.trace(model, out="t"):
        model.generate(torch.ones(4000, 500, dtype=torch.long), max_new_tokens=4)
except RuntimeError as error:
    print(type(error).__name__, "allocate memory" in str(error))
"""
    # the allocator that pyarrow 17 brings ends a process whose address space is limited
    env = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.stdout == "RuntimeError True\n", ended.stderr
    trace = lifetrace.read_trace(tmp_path / "t")
    assert trace.meta["status"] == "oom"
    found = trace.meta["post_mortem"]
    assert found["asked_bytes"] > 2**20
    assert found["phase"] == "prefill"
    assert found["held"]["weights"] == 180_800 * 4


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29),
        (
            "[fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes.",
            640,
        ),
        ("out of memory: tried to allocate 12 bytes with 3 bytes held", 12),
        ("something else", None),
    ],
)
def test_the_bytes_asked_for_are_read_from_the_message(message, expected):
    assert asked_bytes(message) == expected
