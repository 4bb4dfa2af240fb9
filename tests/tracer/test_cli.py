"""The command line as a person types it: real processes for what they print, in-process for the many mistakes."""

import json
import os
import subprocess
import sys
from importlib import resources

import pytest
from click.testing import CliRunner
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

import lifetrace
from lifetrace.cli import main
from reference_model import R_SIZES

QUICK = ["--no-report", "--no-baseline", "--warmup", "0", "--repeats", "1"]


@pytest.fixture
def config_r(tmp_path):
    path = tmp_path / "R.json"
    path.write_text(json.dumps({"model_type": "llama", **R_SIZES}))
    return path


@pytest.fixture
def random_r(config_r, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ["run", *QUICK, "--weights", "random", "--config", str(config_r)]


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin, catch_exceptions=False)


def refused(result, *words):
    assert result.exit_code == 2, result.output
    text = " ".join(result.stderr.split())
    assert "Traceback" not in text
    for word in words:
        assert word in text
    return True


def test_the_main_job_works_offline_without_options(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lifetrace", "run", "--prompt", "The physical hardware limits"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    trace = lifetrace.read_trace(tmp_path / lines[-2].split()[1])
    report = tmp_path / lines[-1].split()[1]
    assert report == trace.path / "report.html"
    assert report.is_file()
    assert trace.meta["status"] == "complete"
    assert trace.meta["overhead"]["tokens_identical"] is True
    assert len(trace.meta["overhead"]["traced_s"]) == 3
    assert len(trace.steps) == 3 * 64
    assert set(trace.spans.stage) == {
        "tokenize", "prepare", "embed", "layer", "final_norm", "lm_head", "sample", "other", "detokenize",
    }  # fmt: skip
    assert trace.meta["output"][0].split()[0] in done.stdout
    for word in ("TTFT", "TPOT", "tokens/s", "prefill", "decode", "KV cache", "stopped by length", "identical"):
        assert word in done.stdout
    assert "tracing 3/3" in done.stderr
    assert "\x1b" not in done.stdout


def test_json_is_one_document_and_nothing_else(random_r):
    result = invoke(*random_r, "--json", "--max-new-tokens", "5", "--prompt", "ab")
    document = json.loads(result.stdout)
    assert document["latency"]["new_tokens"] == 5
    assert document["latency"]["prompt_tokens"] == 2
    assert document["stop_reason"] == "length"
    assert document["report"] is None
    assert {row["stage"] for row in document["stages"]} >= {"embed", "layer", "lm_head", "sample"}


def test_show_and_report_of_a_stored_trace(random_r, tmp_path):
    invoke(*random_r, "--out", "t")
    shown = invoke("show", "t")
    assert shown.exit_code == 0
    assert "TTFT" in shown.stdout
    written = invoke("report", "t", "-o", "page.html")
    assert written.stdout.strip() == "page.html"
    assert "<html" in (tmp_path / "page.html").read_text()[:1000]


def test_prompts_from_stdin_and_files_make_a_batch(random_r, tmp_path):
    (tmp_path / "p.txt").write_text("a longer prompt")
    result = invoke(*random_r, "--prompt", "-", "--prompt-file", "p.txt", "--out", "t", stdin="short")
    assert result.exit_code == 0, result.output
    trace = lifetrace.read_trace("t")
    assert trace.meta["prompt"] == ["short", "a longer prompt"]
    assert trace.meta["calls"][0]["prompt_tokens"] == [5, 15]
    first = trace.steps.iloc[0]
    assert (first.batch, first.tokens_processed, first.tokens_real) == (2, 30, 20)


def test_an_exact_prompt_length_and_batch(random_r):
    invoke(*random_r, "--prompt", "abc", "--prompt-length", "32", "--batch", "2", "--out", "t")
    assert lifetrace.read_trace("t").meta["calls"][0]["prompt_tokens"] == [32, 32]


def test_sampling_is_repeatable_by_its_seed(random_r):
    ids = []
    for seed in (1, 1, 2):
        out = f"t{len(ids)}"
        invoke(*random_r, "--sample", "--temperature", "2.0", "--seed", seed, "--out", out)
        ids.append(lifetrace.read_trace(out).tokens.token_id.tolist())
    assert ids[0] == ids[1] != ids[2]


def test_other_settings_reach_generate(random_r):
    result = invoke(*random_r, "--set", "repetition_penalty=1.5", "--set", "min_new_tokens=3", "--out", "t")
    assert result.exit_code == 0
    generation = lifetrace.read_trace("t").meta["generation"]
    assert generation == {"max_new_tokens": 64, "repetition_penalty": 1.5, "min_new_tokens": 3, "seed": 0}


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("false", False), ("None", None), ("0.5", 0.5), ("static", "static")]
)
def test_settings_are_read_as_json_or_as_python_spells_them(text, value):
    from lifetrace.workload import parse_settings

    assert parse_settings([f"cache_implementation={text}"]) == {"cache_implementation": value}


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    from lifetrace import session

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "folder_name", lambda model: "now-model")
    assert [session.new_folder("m").name for _ in range(3)] == ["now-model", "now-model-2", "now-model-3"]


def test_a_terminal_that_knows_no_dash_still_gets_the_rest(random_r):
    invoke(*random_r, "--out", "t")
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "lifetrace", "show", "t"]
    shown = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert b"TTFT" in shown.stdout


def test_an_interrupted_run_says_where_its_trace_is(random_r, monkeypatch):
    from lifetrace import run_command

    real, calls = run_command._generate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(run_command, "_generate", interrupted)
    result = invoke(*random_r, "--repeats", "2", "--out", "t")
    assert result.exit_code == 1
    assert "lifetrace show t" in result.stderr
    assert lifetrace.read_trace("t").meta["status"] == "interrupted"
    assert "interrupted" in invoke("show", "t").stdout


def test_steps_that_were_not_recorded_are_said(random_r):
    result = invoke(*random_r, "--steps", "2:4", "--max-new-tokens", "8", "--out", "t")
    assert "spans of 2 of 8 steps were recorded" in " ".join(result.stdout.split())
    assert "no spans" in invoke(*random_r, "--steps", "100:", "--max-new-tokens", "4", "--out", "u").stdout


def test_a_value_that_transformers_refuses_is_not_blamed_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("run", *QUICK, "--attn-implementation", "flashy")
    assert refused(result, "demo cannot be loaded", "flashy")
    assert refused(invoke("run", *QUICK, "--model", "smollm2-135m"), "--weights random")


def test_logprobs_are_those_of_the_models_own_distribution(random_r):
    import torch

    from lifetrace.workload import ModelSource, load

    invoke(*random_r, "--prompt", "abcd", "--max-new-tokens", "3", "--logprobs", "2", "--out", "t")
    trace = lifetrace.read_trace("t")
    model = load(ModelSource(random_weights=True, config_file="R.json")).model
    ids = torch.tensor([trace.tokens.token_id.tolist()])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0].float(), -1)
    new = trace.tokens[trace.tokens.source == "generated"]
    assert new.position.tolist() == [4, 5, 6]
    for row in new.itertuples():
        here = expected[row.position - 1]
        assert row.logprob == pytest.approx(here[row.token_id].item(), abs=1e-4)
        assert row.entropy == pytest.approx(-(here.exp() * here).sum().item(), abs=1e-4)
        assert list(row.top_ids) == here.topk(2).indices.tolist()
        assert row.token_id == row.top_ids[0]  # greedy takes the likeliest
    assert trace.tokens[trace.tokens.source == "prompt"].logprob.isna().all()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--max-new-tokens", "0"], ["--max-new-tokens", "not in the range"]),
        (["--max-new-tokens", "-3"], ["not in the range"]),
        (["--max-new-tokens", "600"], ["context of 512", "--max-new-tokens 484"]),
        (["--prompt-length", "600"], ["600 tokens", "512", "shorten"]),
        (["--prompt", "a\udc80b"], ["lone surrogate at character 1"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt", "No such file"]),
        (["--device", "cuda:63"], ["no device cuda:63", "--device cpu"]),
        (["--device", "tpu"], ["no device 'tpu'"]),
        (["--dtype", "float64"], ["float64", "bfloat16"]),
        (["--set", "repetition_penalti=2"], ["Did you mean repetition_penalty"]),
        (["--set", "nonsense"], ["key=value"]),
        (["--set", "num_beams=0"], ["generate() refused these settings"]),
        (["--cache-implementation", "nonsense"], ["refused these settings", "nonsense"]),
        (["--attn-implementation", "nonsense"], ["nonsense"]),
        (["--greedy", "--top-k", "3"], ["--greedy", "--sample"]),
        (["--steps", "5"], ["A:B"]),
        (["--steps", "5:2"], ["A:B"]),
        (["--chat"], ["no chat template"]),
        (["--config", "none.json"], ["no file none.json"]),
        (["--detail", "atoms"], ["layer", "block", "module"]),
    ],
)
def test_a_mistake_gets_a_sentence(random_r, tmp_path, extra, words):
    assert refused(invoke(*random_r, *extra), *words)
    assert not list(tmp_path.glob("traces/*"))


def test_an_empty_prompt_is_the_begin_token_where_there_is_one(random_r):
    invoke(*random_r, "--prompt", "", "--out", "t")
    prompt = lifetrace.read_trace("t").tokens.query("source == 'prompt'")
    assert prompt.token_id.tolist() == [R_SIZES["bos_token_id"]]


def test_an_empty_prompt_without_begin_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps({"model_type": "llama", **R_SIZES, "bos_token_id": None}))
    result = invoke("run", *QUICK, "--weights", "random", "--config", "c.json", "--prompt", "")
    assert refused(result, "prompt is empty", "no begin token")


def test_models_that_are_no_causal_language_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained("classifier")
    T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8)
    ).save_pretrained("t5")
    (tmp_path / "empty").mkdir()
    assert refused(
        invoke("run", *QUICK, "--model", "classifier"), "BertForSequenceClassification", "AutoModelForCausalLM"
    )
    assert refused(invoke("run", *QUICK, "--model", "t5"), "encoder–decoder")
    assert refused(invoke("run", *QUICK, "--model", "empty"), "no config.json")
    assert refused(invoke("run", *QUICK, "--model", "nobody/nothing"), "nobody/nothing", "offline mode is on")
    assert refused(invoke("run", *QUICK, "--model", "./nowhere"), "./nowhere does not exist")
    assert refused(invoke("run", *QUICK, "--model", "missing.gguf"), "no file missing.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    assert refused(invoke("run", *QUICK, "--model", "cut.gguf"), "cannot be read as GGUF", "cut short")
    assert not (tmp_path / "traces").exists() or not list((tmp_path / "traces").iterdir())


def test_folders(random_r, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    assert refused(invoke(*random_r, "--out", "full"), "not empty", "--force")
    assert refused(invoke(*random_r, "--out", "full", "--force"), "does not delete")
    (tmp_path / "file").write_text("x")
    assert refused(invoke(*random_r, "--out", "file"), "is a file")
    assert refused(invoke(*random_r, "--out", "/proc/lifetrace"), "cannot be written")
    assert refused(invoke("show", "nowhere"), "no folder nowhere")
    assert refused(invoke("show", "full"), "no run.json")
    assert invoke(*random_r, "--out", "t").exit_code == 0
    assert refused(invoke(*random_r, "--out", "t"), "not empty")
    assert invoke(*random_r, "--out", "t", "--force").exit_code == 0


def test_a_disk_that_fills_is_a_failed_run_whose_beginning_reads_back(random_r, monkeypatch):
    from lifetrace import writer

    written, real = [], writer.pq.write_table

    def nearly_full(rows, name, **settings):
        if isinstance(name, str):  # what is encoded into memory needs no disk
            written.append(name)
        if len(written) > 2:
            raise OSError(28, "No space left on device")
        real(rows, name, **settings)

    monkeypatch.setattr(writer.pq, "write_table", nearly_full)
    result = invoke(*random_r, "--max-new-tokens", "100", "--out", "t")
    assert result.exit_code == 1
    assert "the disk is full" in result.stderr
    trace = lifetrace.read_trace("t")
    assert 1 <= len(trace.steps) <= 100  # of the first part, after 512 steps or 2 seconds
    assert trace.steps.step.tolist() == list(range(len(trace.steps)))
    assert trace.steps.flops.isna().all()


def test_help_names_every_option_under_a_heading():
    text = invoke("run", "--help").stdout
    for heading in ("Prompt:", "Model:", "Generation:", "Recording:", "Output:"):
        assert heading in text
    assert "[default: 64" in text


def test_the_demo_model_is_small_and_reads_any_unicode():
    from transformers import AutoTokenizer

    folder = resources.files("lifetrace.demo_model")
    weights = folder / "model.safetensors"
    assert weights.stat().st_size < 6_500_000
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    text = "naïve 日本語 🦙 \u202eabc"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("pair", "options", "says"),
    [
        ("max_new_tokens=7", [], "what --max-new-tokens is for"),
        ("temperature=0.5", ["--temperature", "0.7"], "temperature is given by an option and by --set"),
    ],
)
def test_what_is_given_twice_is_refused(pair, options, says):
    result = CliRunner().invoke(main, ["run", "--set", pair, *options])
    assert result.exit_code == 2
    assert says in result.stderr
