"""A fault of our own, wherever it strikes: the program's tokens and exceptions are its own, and it is told once."""

import subprocess
import sys
import warnings

import pytest
import torch
from left_behind import left_behind

import lifetrace
from lifetrace.hooks import attach, clocks, generation, kvcache, kvstate, recorder
from lifetrace.session import Session
from lifetrace.writer import TraceWriter
from reference_model import R_SIZES

# Wherever our code runs while the program's block does, with the moment of the fault among its calls.
PLACES = [
    (recorder.Recorder, "begin_call"),
    (recorder.Recorder, "_open_step"),
    (recorder.Recorder, "_close_step"),
    (recorder.Recorder, "_set_aside"),
    (recorder.Recorder, "_note_cache"),
    (recorder.Recorder, "_flush_if_due"),
    (recorder, "_signature"),
    (clocks.HostTape, "mark"),
    (clocks.HostTape, "cut"),
    (kvcache, "find_cache"),
    (kvcache, "read"),
    (kvstate.CacheWatch, "before"),
    (kvstate.CacheWatch, "after"),
    (attach.Attachment, "toggle"),
    (generation, "_note_inputs"),
    (Session, "_write"),
    (Session, "_complete"),
    (Session, "_find_ceilings"),
    (Session, "_close"),
    (Session, "_texts"),
    (TraceWriter, "part"),
    (TraceWriter, "complete"),
    (TraceWriter, "table"),
]


class Fault(Exception):
    """What no program raises."""


def break_at(monkeypatch, owner, name, moment):
    """Let a function fail from its nth call on."""
    working, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(name)
        if len(calls) >= moment:
            raise Fault("a bug of ours")
        return working(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "moment"),
    [(*place, 1) for place in PLACES] + [(*place, 3) for place in PLACES if place[0] is not Session],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_ends_the_recording_and_nothing_else(model_r, prompt_12, tmp_path, monkeypatch, owner, name, moment):
    expected = model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
    before = left_behind(model_r)
    with monkeypatch.context() as patched:
        calls = break_at(patched, owner, name, moment)
        trace = lifetrace.trace(model_r, out=tmp_path / "t", detail="layer")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with trace:
                generated = [model_r.generate(prompt_12, max_new_tokens=4, do_sample=False) for _ in range(2)]
    assert all(torch.equal(expected, tokens) for tokens in generated)
    assert left_behind(model_r) == before
    assert calls
    if len(calls) < moment:  # it is not called so often
        assert [str(one.message) for one in told] == []
        return
    (one,) = told
    assert "lifetrace failed while recording: Fault: a bug of ours" in str(one.message)
    assert trace.meta["status"] == "failed"
    assert any("a bug of ours" in note for note in trace.meta["notes"])
    if moment == 1:
        with lifetrace.trace(model_r, out=tmp_path / "next", detail="layer") as following:
            model_r.generate(prompt_12, max_new_tokens=2)
        assert len(following.steps) == 2


def test_what_was_recorded_before_a_fault_is_kept_and_counted(model_r, prompt_12, tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="a bug of ours"), lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=4)
        break_at(monkeypatch, kvcache, "find_cache", 1)
        model_r.generate(prompt_12, max_new_tokens=4)
    assert len(trace.steps) == 4
    assert trace.steps.flops.notna().all()
    assert trace.meta["error"] == "RunError: lifetrace failed while recording: Fault: a bug of ours"


@pytest.mark.parametrize("action", ["default", "error"])
def test_the_programs_exception_keeps_its_place(model_r, prompt_12, tmp_path, monkeypatch, action, capsys):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("an exception that cannot be shown")

    raised = Odd()
    break_at(monkeypatch, Session, "_complete", 1)
    with warnings.catch_warnings(record=action == "default"):
        warnings.simplefilter(action)
        with pytest.raises(Odd) as caught, lifetrace.trace(model_r, out=tmp_path / "t", strict=True):
            model_r.generate(prompt_12, max_new_tokens=2)
            raise raised
    assert caught.value is raised
    if action == "error":
        assert "a bug of ours" in capsys.readouterr().err
    assert lifetrace.read_trace(tmp_path / "t").meta["status"] == "failed"


def test_strict_raises_when_the_block_has_ended(model_r, prompt_12, tmp_path, monkeypatch):
    break_at(monkeypatch, recorder, "_signature", 1)
    generated = []
    with (
        pytest.raises(lifetrace.RunError, match="a bug of ours"),
        lifetrace.trace(model_r, out=tmp_path / "t", strict=True),
    ):
        generated.append(model_r.generate(prompt_12, max_new_tokens=2))
    assert generated


@pytest.mark.parametrize(
    ("owner", "name"),
    [(recorder, "_signature"), (Session, "__init__"), (Session, "_complete"), (Session, "use_tokenizer")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_under_trace_all(model_r, prompt_12, tmp_path, monkeypatch, owner, name):
    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    before = left_behind(model_r)
    for strict in (False, True):
        with monkeypatch.context() as patched:
            break_at(patched, owner, name, 1)
            tracing = lifetrace.trace_all(out=tmp_path / str(strict), detail="layer", strict=strict)
            ended = pytest.raises(lifetrace.RunError, match="a bug of ours") if strict else warnings.catch_warnings()
            with ended, tracing:
                generated = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
        assert torch.equal(expected, generated)
        assert len([note for note in tracing.notes if "a bug of ours" in note]) == 1
    assert left_behind(model_r) == before


PROGRAM = f"""
import torch
from lifetrace.hooks import recorder

def broken(*args):
    raise KeyError("a bug of ours")

recorder._signature = broken
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{R_SIZES!r})).eval()
print(model.generate(torch.arange(3, 15)[None], max_new_tokens=4).tolist())
"""


@pytest.mark.parametrize(
    ("options", "ending", "code"), [([], "", 0), (["--strict"], "", 1), (["--strict"], "raise SystemExit(7)", 7)]
)
def test_a_fault_under_exec(tmp_path, options, ending, code):
    (tmp_path / "program.py").write_text(PROGRAM + ending)
    ended = subprocess.run(
        [sys.executable, "-m", "lifetrace", "exec", "--out", "t", "--no-report", *options, "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert len(ended.stdout.splitlines()) == 1
    assert ended.stderr.count("a bug of ours") == 1
    assert "Traceback" not in ended.stderr
    assert lifetrace.read_trace(tmp_path / "t").meta["status"] == "failed"
