"""A user's program under `lifetrace exec`: as without it, and traced. Real programs, in processes of their own."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from click.testing import CliRunner
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace.cli import main
from reference_model import R_SIZES

MODEL = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{R_SIZES!r})).eval()
prompt = torch.arange(3, 15)[None]
"""

PROGRAM = f"""
import atexit, os, sys, threading
print(__name__, os.path.basename(__file__), sys.argv[1:], "transformers" in sys.modules, flush=True)
{MODEL}
import __main__
assert __main__.model is model and __main__.__file__ == __file__
print(model.generate(prompt, max_new_tokens=4).tolist())
thread = threading.Thread(target=lambda: print(model.generate(prompt[:, :5], max_new_tokens=3).tolist()))
thread.start()
thread.join()
atexit.register(print, "last words")
print("to stderr", file=sys.stderr)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a program alone and under lifetrace; returns both ended processes."""
    monkeypatch.chdir(tmp_path)

    def both(source, *arguments, name="program.py"):
        (tmp_path / name).write_text(source)
        command = [name, *arguments]
        alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        options = ["-m", "lifetrace", "exec", "--out", "t", "--no-report"]
        traced = subprocess.run([sys.executable, *options, *command], capture_output=True, text=True, check=False)
        return alone, traced

    return both


def without_ours(stderr):
    return [line for line in stderr.splitlines() if not line.startswith("lifetrace: ")]


def test_a_program_runs_as_without_and_its_calls_are_told_apart(run):
    alone, traced = run(PROGRAM + "\nsys.exit(3)", "--model", "x y")
    assert "__main__ program.py ['--model', 'x y'] False" in alone.stdout
    assert traced.stdout == alone.stdout
    assert (traced.returncode, alone.returncode) == (3, 3)
    assert without_ours(traced.stderr) == alone.stderr.splitlines()
    assert "lifetrace: traced 2 calls of generate()" in traced.stderr
    trace = lifetrace.read_trace("t")
    assert trace.meta["status"] == "complete"
    assert "program.py --model 'x y'" in trace.meta["command"]
    assert [call["new_tokens"] for call in trace.meta["calls"]] == [[4], [3]]
    assert trace.steps.groupby("call").q_len.first().tolist() == [12, 5]
    assert trace.steps.op_count.notna().all()


def test_an_uncaught_exception_ends_as_without(run):
    alone, traced = run(PROGRAM + "\ndef deep():\n    return 1 / 0\n\ndeep()")
    assert traced.returncode == alone.returncode == 1
    assert traced.stdout == alone.stdout
    assert without_ours(traced.stderr) == alone.stderr.splitlines()
    assert "ZeroDivisionError" in traced.stderr
    trace = lifetrace.read_trace("t")
    assert trace.meta["status"] == "failed"
    assert trace.meta["error"] == "ZeroDivisionError: division by zero"
    assert len(trace.steps) == 7


def test_a_syntax_error_is_shown_without_a_frame_of_ours(run):
    alone, traced = run("def broken(:\n    pass\n")
    assert traced.returncode == alone.returncode == 1
    assert without_ours(traced.stderr) == alone.stderr.splitlines()


def test_a_module_with_a_generate_in_a_thread_that_outlives_the_program(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "serve.py").write_text(
        f"import sys, threading, time\n{MODEL}\n"
        "def work():\n    time.sleep(0.3)\n    model.generate(prompt, max_new_tokens=5)\n"
        "    print('served', sys.argv[1:])\n"
        "if __name__ == '__main__':\n    threading.Thread(target=work).start()\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["-m", "lifetrace", "exec", "--detail", "layer", "--out", "t", "-m", "pack.serve", "--port", "1"]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "served ['--port', '1']\n"
    assert (tmp_path / "t" / "report.html").is_file()
    trace = lifetrace.read_trace("t")
    assert len(trace.steps) == 5
    assert trace.spans.part.dropna().isin(["logits", "draw", "stop_check"]).all()


def test_control_c_ends_as_without(run, tmp_path, monkeypatch):
    source = (
        f"{MODEL}\nmodel.generate(prompt, max_new_tokens=4)\nprint('waiting', flush=True)\nimport time\ntime.sleep(60)"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wait.py").write_text(source)
    codes = []
    for options in ([], ["-m", "lifetrace", "exec", "--out", "t", "--no-report"]):
        process = subprocess.Popen(
            [sys.executable, *options, "wait.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)  # until it sleeps: what is raised where Python clears up after itself goes nowhere
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in error
        codes.append(process.returncode)
    assert codes == [-signal.SIGINT, -signal.SIGINT]
    assert lifetrace.read_trace("t").meta["status"] == "interrupted"


def test_a_web_handler_in_a_worker_thread(run):
    """A real Flask server in a thread, asked twice over HTTP."""
    pytest.importorskip("flask")
    alone, traced = run(
        f"""
import threading, urllib.request
from flask import Flask
from werkzeug.serving import make_server
{MODEL}
app = Flask("served")

@app.get("/<int:count>")
def answer(count):
    return str(model.generate(prompt, max_new_tokens=count).tolist())

server = make_server("127.0.0.1", 0, app, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
for count in (3, 5):
    print(urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}/{{count}}").read().decode())
server.shutdown()
"""
    )
    assert alone.returncode == traced.returncode == 0, traced.stderr
    assert traced.stdout == alone.stdout
    assert [call["new_tokens"] for call in lifetrace.read_trace("t").meta["calls"]] == [[3], [5]]


def test_a_pipeline_gives_its_tokens_their_text(run):
    alone, traced = run(
        """
from importlib import resources
from transformers import pipeline
pipe = pipeline("text-generation", model=str(resources.files("lifetrace.demo_model")), device="cpu")
print(pipe("The old house", max_new_tokens=6, do_sample=False))
"""
    )
    assert traced.stdout == alone.stdout
    assert traced.returncode == 0, traced.stderr
    trace = lifetrace.read_trace("t")
    assert trace.meta["prompt"] == ["The old house"]
    assert trace.tokens.text.notna().all()


def test_a_program_that_traces_itself_has_both_traces(run):
    source = f"""
import lifetrace
{MODEL}
model.generate(prompt, max_new_tokens=2)
with lifetrace.trace(model, out="own", force=True) as trace:
    model.generate(prompt, max_new_tokens=3)
print(len(trace.steps))
model.generate(prompt, max_new_tokens=4)
"""
    run(source)
    assert len(lifetrace.read_trace("own").steps) == 3
    assert len(lifetrace.read_trace("t").steps) == 2 + 4


def test_an_encoder_decoder_runs_untraced_and_that_is_said(run):
    alone, traced = run(
        """
import torch
from transformers import T5Config, T5ForConditionalGeneration
torch.manual_seed(0)
model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
print(model.generate(torch.arange(3, 9)[None], max_new_tokens=3, decoder_start_token_id=0).tolist())
"""
    )
    assert traced.stdout == alone.stdout
    assert traced.returncode == 0
    assert "T5ForConditionalGeneration is not traced" in traced.stderr
    assert not os.path.exists("t")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no program to run"),
        (["nowhere.py"], "nowhere.py cannot be read"),
        (["--detail", "x", "y.py"], "'x' is not"),
        (["--out", "thesis", "ends.py"], "thesis is not empty"),
        (["--out", "ends.py", "ends.py"], "is a file"),
    ],
)
def test_mistakes_end_in_a_sentence_before_the_program_runs(arguments, says, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "ends.py").write_text("raise SystemExit(5)")
    ended = subprocess.run(
        [sys.executable, "-m", "lifetrace", "exec", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) <= 4
    assert "came to no generate" not in ended.stderr
    assert "Traceback" not in ended.stderr


# -- in one's own code -------------------------------------------------------------------------


def test_every_model_of_a_block_has_a_trace(model_r, prompt_12, tmp_path):
    other = LlamaForCausalLM(LlamaConfig(**R_SIZES | {"num_hidden_layers": 2})).eval()
    before = GenerationMixin.generate
    with lifetrace.trace_all(out=tmp_path / "t", detail="layer") as tracing:
        model_r.generate(prompt_12, max_new_tokens=2)
        other.generate(prompt_12, max_new_tokens=3)
        model_r.generate(prompt_12, max_new_tokens=4)
    assert GenerationMixin.generate is before
    assert [path.name for path in tracing.paths] == ["t", "t-2"]
    first, second = tracing.traces
    assert [call["new_tokens"] for call in first.meta["calls"]] == [[2], [4]]
    assert second.meta["model"]["layers"] == 2
    assert not model_r._forward_hooks


def test_a_generate_of_the_models_own_runs_once(prompt_12, tmp_path):
    """It calls on by `super()`, and what it does to its arguments must not be done twice."""

    class Doubling(LlamaForCausalLM):
        def generate(self, ids, **options):
            return super().generate(torch.cat([ids, ids], dim=-1), **options)

    model = Doubling(LlamaConfig(**R_SIZES)).eval()
    with lifetrace.trace_all(tmp_path / "t") as tracing:
        lengths = [model.generate(prompt_12, max_new_tokens=2).shape[-1] for _ in range(2)]
    assert lengths == [12 + 12 + 2] * 2
    assert tracing.calls == 2


def test_a_decorated_function_begins_a_trace_each_time(model_r, prompt_12, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracing = lifetrace.trace_all(detail="layer")

    @tracing
    def answer(count):
        return model_r.generate(prompt_12, max_new_tokens=count)

    expected = model_r.generate(prompt_12, max_new_tokens=3)
    assert torch.equal(answer(3), expected)
    first = tracing.paths
    answer(2)
    assert len(first) == len(tracing.paths) == 1
    assert first != tracing.paths
    assert [len(lifetrace.read_trace(path).steps) for path in (*first, *tracing.paths)] == [3, 2]


def test_assisted_decoding_is_one_trace(model_r, prompt_12, tmp_path):
    assistant = LlamaForCausalLM(LlamaConfig(**R_SIZES | {"num_hidden_layers": 1})).eval()
    with lifetrace.trace_all(out=tmp_path / "t") as tracing:
        model_r.generate(prompt_12, max_new_tokens=6, assistant_model=assistant, do_sample=False)
    (trace,) = tracing.traces
    assert {"main", "assistant"} == set(trace.steps.role)


def test_threads_at_once_are_told_apart(model_r, prompt_12, tmp_path):
    with lifetrace.trace_all(out=tmp_path / "t", detail="layer") as tracing:
        threads = [
            threading.Thread(target=model_r.generate, args=(prompt_12,), kwargs={"max_new_tokens": count})
            for count in (3, 4, 5)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join()
    (trace,) = tracing.traces
    assert sorted(call["new_tokens"][0] for call in trace.meta["calls"]) == [3, 4, 5]


def test_help_names_what_it_does():
    shown = CliRunner().invoke(main, ["exec", "--help"])
    assert "Run a Python program unchanged" in shown.output
