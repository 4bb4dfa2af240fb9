"""`lifetrace sweep`: a grid of ordinary traces that goes on where it was killed."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import lifetrace
from lifetrace import calibrate, run_command, workload
from lifetrace.analysis.trace import read_traces
from lifetrace.cli import main
from reference_model import R_SIZES

QUICK = ["--repeats", "1", "--warmup", "0", "--no-baseline", "--no-memory", "--no-report"]
GRID = ["--prompt-length", "8,16", "--batch", "1,2", "--max-new-tokens", "4"]
NAMES = [f"prompt{prompt}-batch{batch}-new4" for prompt in (8, 16) for batch in (1, 2)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sweep(*arguments, quick=QUICK):
    return CliRunner().invoke(main, ["sweep", "--out", "s", *quick, *map(str, arguments)], catch_exceptions=False)


def meta(name):
    return lifetrace.read_trace(f"s/{name}").meta


def rows():
    return {row["name"]: row for row in pq.read_table("s/sweep.parquet").to_pylist()}


def contents(folder):
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}


def test_each_point_is_an_ordinary_trace_and_all_are_one_dataset(tmp_path):
    result = sweep(*GRID)
    assert result.exit_code == 0, result.output
    assert [trace.path.name for trace in read_traces(tmp_path / "s")] == sorted(NAMES)
    for prompt in (8, 16):
        for batch in (1, 2):
            call = meta(f"prompt{prompt}-batch{batch}-new4")["calls"][0]
            assert call["prompt_tokens"] == [prompt] * batch
            assert call["new_tokens"] == [4] * batch
    assert [line.partition("  ")[0] for line in result.stderr.splitlines()[1:]] == ["1/4", "2/4", "3/4", "4/4"]
    assert "left" in result.stderr


def test_the_table_holds_the_figures_of_each_trace():
    sweep(*GRID)
    table = rows()
    assert list(table) == NAMES
    for name, row in table.items():
        call = meta(name)["calls"][0]
        assert row["ttft_ns"] == call["first_token_ns"] - call["request_start_ns"]
        assert row["tpot_ns"] == (call["last_token_ns"] - call["first_token_ns"]) / 3
        assert row["decode_tokens_per_s"] == pytest.approx(row["batch"] * 1e9 / row["tpot_ns"])
        steps = lifetrace.read_trace(f"s/{name}").steps
        assert set(steps.run_id) == {row["run_id"]}
        assert row["kv_bytes"] == steps.kv_bytes.max()
        assert row["prefill_step_ns"] == steps.wall_ns[0]
        assert row["decode_step_ns"] == pytest.approx(steps.wall_ns[1:].mean())
        assert row["decode_roof_ns"] / row["decode_step_ns"] == pytest.approx(row["decode_efficiency"])
        assert (row["status"], row["reason"], row["threads"], row["dtype"]) == ("complete", None, 1, "float32")


def test_dtype_and_attention_reach_their_points_and_a_model_is_loaded_once(monkeypatch):
    loads = []
    load = workload.load
    monkeypatch.setattr(workload, "load", lambda source: loads.append(source) or load(source))
    result = sweep(
        "--prompt-length", "4,8", "--max-new-tokens", "2",
        "--dtype", "float32,bfloat16", "--attn-implementation", "sdpa,eager",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    pairs = [("float32", "sdpa"), ("float32", "eager"), ("bfloat16", "sdpa"), ("bfloat16", "eager")]
    assert [(source.dtype, source.attention) for source in loads] == pairs
    for dtype, attention in pairs:
        model = meta(f"prompt8-batch1-new2-{dtype}-{attention}")["model"]
        assert (model["dtype"], model["attention"]) == (dtype, attention)


def test_cache_and_threads_reach_their_points(monkeypatch):
    monkeypatch.setattr(calibrate, "ceilings_for", lambda *_: (None, []))
    threads = torch.get_num_threads()
    grid = ["--prompt-length", "8", "--max-new-tokens", "1"]
    sweep(*grid, "--threads", "1,2", "--cache-implementation", "dynamic,static")
    assert torch.get_num_threads() == threads
    for cache, kind in (("dynamic", "full"), ("static", "static")):
        for count in (1, 2):
            trace = lifetrace.read_trace(f"s/prompt8-batch1-new1-{cache}-threads{count}")
            assert set(trace.kv.kind) == {kind}
            assert trace.meta["device"]["threads"] == count


def test_a_static_cache_is_not_as_long_as_that_of_the_point_before():
    sweep("--prompt-length", "64,8", "--max-new-tokens", "4", "--cache-implementation", "static")
    alone = ["run", *QUICK, "--prompt-length", "8", "--max-new-tokens", "4", "--cache-implementation", "static"]
    CliRunner().invoke(main, [*alone, "--out", "alone"], catch_exceptions=False)
    expected = lifetrace.read_trace("alone").steps.kv_allocated_bytes.max()
    assert lifetrace.read_trace("s/prompt8-batch1-new4-static").steps.kv_allocated_bytes.max() == expected
    assert lifetrace.read_trace("s/prompt64-batch1-new4-static").steps.kv_allocated_bytes.max() > expected


def test_no_end_token_ends_a_point(tmp_path):
    every_token_ends = {"model_type": "llama", **R_SIZES, "eos_token_id": list(range(R_SIZES["vocab_size"]))}
    (tmp_path / "R.json").write_text(json.dumps(every_token_ends))
    result = sweep(
        "--weights", "random", "--config", "R.json", "--prompt-length", "4", "--max-new-tokens", "5", "--batch", "2"
    )
    assert result.exit_code == 0, result.output
    call = meta("prompt4-batch2-new5")["calls"][0]
    assert (call["new_tokens"], call["stop_reason"]) == ([5, 5], "length")


# -- what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "failed", "kept", "reason"),
    [
        (["--prompt-length", "2000,8"], "prompt2000-batch1-new64", "prompt8-batch1-new64", "context holds 1,024"),
        (
            ["--prompt-length", "8", "--attn-implementation", "nonsense,sdpa"],
            "prompt8-batch1-new64-nonsense",
            "prompt8-batch1-new64-sdpa",
            "nonsense",
        ),
        (
            ["--prompt-length", "8", "--cache-implementation", "nonsense,dynamic"],
            "prompt8-batch1-new64-nonsense",
            "prompt8-batch1-new64-dynamic",
            "generate() refused these settings",
        ),
    ],
)
def test_a_point_that_cannot_be_is_noted_and_the_others_run(tmp_path, arguments, failed, kept, reason):
    result = sweep(*arguments)
    assert result.exit_code == 1
    table = rows()
    assert (table[failed]["status"], table[kept]["status"]) == ("failed", "complete")
    assert reason in table[failed]["reason"]
    assert table[failed]["tpot_ns"] is None
    assert reason in " ".join(result.stdout.split())
    assert not (tmp_path / "s" / failed).exists()


def test_a_point_without_memory_keeps_its_trace_and_the_rest_runs(monkeypatch):
    generate = run_command._generate

    def short_of_memory(settings, loaded, inputs):
        if len(inputs["input_ids"]) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(settings, loaded, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(run_command, "_generate", short_of_memory)
        result = sweep(*GRID)
    assert result.exit_code == 1
    assert {name: row["status"] for name, row in rows().items()} == dict(
        zip(NAMES, ["oom", "complete"] * 2, strict=True)
    )
    assert "out of memory" in rows()[NAMES[0]]["reason"].lower()
    again = sweep(*GRID)
    assert again.exit_code == 0, again.output
    assert {row["status"] for row in rows().values()} == {"complete"}
    assert {row["reason"] for row in rows().values()} == {None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "1,,2"], "no list of whole numbers above 0"),
        (["--batch", "0"], "no list of whole numbers above 0"),
        (["--dtype", "float32,int8"], "'int8' is not one of"),
        (["--attn-implementation", "sdpa,"], "has an empty place"),
        (["--model", "./nowhere"], "does not exist"),
        (["--model", "demo", "--device", "cuda:99"], "There is no device cuda:99"),
        (["--attn-implementation", "a/b,a_b"], "would lie in the same folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(tmp_path, arguments, words):
    result = sweep(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert not (tmp_path / "s").exists()


# -- going on ----------------------------------------------------------------------------------


def test_it_goes_on_after_a_kill_and_leaves_alone_what_was_complete(tmp_path):
    options = [*QUICK, *GRID, "--out", "s"]
    command = [sys.executable, "-m", "lifetrace", "sweep", *options]
    folder = tmp_path / "s"

    def complete():
        done = [file for file in folder.glob("*/run.json") if json.loads(file.read_text())["status"] == "complete"]
        return sorted(file.parent for file in done)

    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running.poll() is None and not (complete() and len(list(folder.glob("*/run.json"))) > 1):
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    kept = complete()
    assert 1 <= len(kept) < 4
    before = {path.name: contents(path) for path in kept}
    assert not (folder / "sweep.parquet").exists()

    result = CliRunner().invoke(main, command[3:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"4 points, {len(kept)} of them complete already" in result.stderr
    assert {path.name: contents(path) for path in kept} == before
    table = rows()
    assert list(table) == NAMES
    assert {row["status"] for row in table.values()} == {"complete"}
    assert all(row["tpot_ns"] is not None for row in table.values())
    assert len(read_traces(folder)) == 4

    untouched = contents(folder)
    assert CliRunner().invoke(main, command[3:], catch_exceptions=False).exit_code == 0
    changed = {file for file, state in contents(folder).items() if untouched[file][1] != state[1]}
    assert not changed


def no_folder(point):
    pass


def empty_folder(point):
    point.mkdir()


def half_manifest(point):
    point.mkdir()
    (point / ".run.json.123.tmp").write_text("{")


def half_part(point):
    (point / "steps").mkdir(parents=True)
    (point / "run.json").write_text(json.dumps({"format_version": 1, "status": "running"}))
    (point / "steps" / ".part-00000.parquet.123.tmp").write_bytes(b"PAR1")


def damaged_manifest(point):
    point.mkdir()
    (point / "run.json").write_text("{")


@pytest.mark.parametrize("leave", [no_folder, empty_folder, half_manifest, half_part, damaged_manifest])
def test_it_goes_on_from_whatever_a_kill_leaves(tmp_path, leave):
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / ".sweep.json.abc.tmp").write_text("{")
    leave(folder / NAMES[0])
    if (folder / NAMES[0]).exists():  # a sweep writes its own file before its first point
        begun = {"points": [], "format": 1}
        (folder / "sweep.json").write_text(json.dumps(begun | sample_head()))
    result = sweep("--prompt-length", "8,16", "--max-new-tokens", "4")
    assert result.exit_code == 0, result.output
    assert {row["status"] for row in rows().values()} == {"complete"}
    assert not list(folder.rglob("*.tmp"))
    first = result.stderr.splitlines()[1]
    assert ("prompt 8, batch 1," in first) == (leave is not half_part)  # what was killed before comes last


def sample_head():
    """Settings, versions and device as a sweep of this test writes them."""
    CliRunner().invoke(main, ["sweep", "--out", "sample", *QUICK, "--prompt-length", "4", "--max-new-tokens", "1"])
    with open("sample/sweep.json", encoding="ascii") as file:
        document = json.load(file)
    return {key: document[key] for key in ("settings", "versions", "device")}


def test_another_grid_extends_the_folder(tmp_path):
    sweep("--prompt-length", "8", "--batch", "1,2", "--max-new-tokens", "4")
    before = contents(tmp_path / "s" / NAMES[0])
    result = sweep("--prompt-length", "8,16", "--batch", "1", "--max-new-tokens", "4")
    assert result.exit_code == 0
    assert "2 points, 1 of them complete already" in result.stderr
    assert list(rows()) == NAMES[:3]
    assert contents(tmp_path / "s" / NAMES[0]) == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["--detail", "block"], 'with detail "layer", and this one has "block"'),
        (["--seed", "7"], "with seed 0, and this one has 7"),
        (["--set", "do_sample=true"], 'with generation {}, and this one has {"do_sample": true}'),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(tmp_path, other, words):
    sweep(*GRID[:4], "--max-new-tokens", "1")
    before = contents(tmp_path / "s")
    result = sweep(*GRID[:4], "--max-new-tokens", "1", *other)
    assert result.exit_code == 2
    assert words in result.stderr
    assert contents(tmp_path / "s") == before


def test_other_versions_in_the_same_folder_are_refused(tmp_path):
    sweep("--prompt-length", "8", "--max-new-tokens", "1")
    file = tmp_path / "s" / "sweep.json"
    of_another = re.sub(r'"torch": "[^"]+"', '"torch": "1.0"', file.read_text())
    file.write_text(of_another)
    result = sweep("--prompt-length", "8", "--max-new-tokens", "1")
    assert result.exit_code == 2
    assert 'with version of torch "1.0"' in result.stderr


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("years of work")
    result = sweep(*GRID)
    assert result.exit_code == 2
    assert "holds something that is no sweep" in result.stderr
    assert [file.name for file in (tmp_path / "s").iterdir()] == ["thesis.tex"]


def test_two_sweeps_do_not_write_into_one_folder(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "s").mkdir()
    handle = os.open(tmp_path / "s", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    result = sweep(*GRID)
    os.close(handle)
    assert result.exit_code == 2
    assert "Another sweep is writing into s" in result.stderr
    assert sweep("--prompt-length", "8", "--max-new-tokens", "1").exit_code == 0


def test_an_interrupt_ends_the_sweep_and_says_how_to_go_on(monkeypatch):
    generate, done = run_command._generate, []

    def interrupted(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(generate(*arguments))
        return done[-1]

    with monkeypatch.context() as patched:
        patched.setattr(run_command, "_generate", interrupted)
        result = sweep(*GRID)
    assert result.exit_code == 1
    assert "Interrupted: 2 of 4 points in s are complete; the same command goes on with the rest." in result.stderr
    assert sweep(*GRID).exit_code == 0
    assert {row["status"] for row in rows().values()} == {"complete"}


# -- what is printed ---------------------------------------------------------------------------


def test_json_is_one_document_and_nothing_else():
    document = json.loads(sweep(*GRID, "--json").stdout)
    assert document["varying"] == ["prompt_length", "batch"]
    assert [point["name"] for point in document["points"]] == NAMES
    assert document["failed"] == []
    assert document["report"] is None
    assert document["settings"]["repeats"] == 1


def test_by_default_it_lies_beside_the_traces_under_the_name_of_the_model(tmp_path):
    options = ["sweep", *QUICK, "--prompt-length", "4", "--max-new-tokens", "1"]
    assert CliRunner().invoke(main, options).exit_code == 0
    assert (tmp_path / "traces" / "sweep-demo" / "prompt4-batch1-new1" / "run.json").is_file()


def test_show_prints_the_table_of_a_sweep_and_lists_other_runs(tmp_path):
    sweep(*GRID)
    shown = CliRunner().invoke(main, ["show", "s"]).stdout
    assert "Lowest TPOT" in shown
    assert json.loads(CliRunner().invoke(main, ["show", "s", "--json"]).stdout)["varying"] == ["prompt_length", "batch"]
    assert CliRunner().invoke(main, ["report", "s", "-o", "page.html"]).stdout.strip() == "page.html"
    assert "Sweep over prompt length and batch" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "s" / "sweep.json").unlink()
    listed = CliRunner().invoke(main, ["show", "s"], env={"COLUMNS": "120"}).stdout
    assert [name in listed for name in NAMES] == [True] * 4
    assert [run["name"] for run in json.loads(CliRunner().invoke(main, ["show", "s", "--json"]).stdout)] == sorted(
        NAMES
    )
    refused = CliRunner().invoke(main, ["show", "s", "--format", "csv"])
    assert (refused.exit_code, "is of one trace" in refused.stderr) == (2, True)
