"""Several processes of one job: each writes its partition, and one trace is read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from killing import model_r as make_r

import lifetrace
from lifetrace.cli import main
from lifetrace.errors import TraceError, UsageError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "tensor_parallel.py"
PROMPT = torch.arange(3, 15)[None]


def two_processes(*command):
    """Run a script in two processes under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*torchrun, *map(str, command)], capture_output=True, text=True, check=False, timeout=300)


def model_r_shared_out(folder, how):
    """Model R in tensor parallelism; its trace is in `t`."""
    make_r().save_pretrained(folder / "model")
    return two_processes(SCRIPT, folder / "model", folder / "t", how)


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    """Two real processes, of which the second takes 50 ms longer in each layer."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = model_r_shared_out(folder, "slow")
    assert ended.returncode == 0, ended.stderr
    said = sorted(line for line in ended.stdout.replace("rank", "\nrank").splitlines() if line.startswith("rank"))
    assert [line[:6] for line in said] == ["rank 0", "rank 1"]
    assert said[0][6:] == said[1][6:]
    return folder / "t"


def test_one_trace_is_read_of_two_processes(slow_rank):
    trace = lifetrace.read_trace(slow_rank)
    assert [one.rank for one in trace.ranks] == [0, 1]
    assert trace.steps.groupby("rank").step.apply(list).to_dict() == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert trace.steps.run_id.nunique() == 1
    assert trace.meta["world_size"] == 2
    assert trace.gaps == []
    assert len(trace.table("steps")) == 4


def test_each_process_counts_its_own_half(slow_rank):
    """All matrices of model R are split in two, the norms (9 of 64 numbers) are not; nor everywhere the embedding."""
    embedding_is_split = "communication" in set(lifetrace.read_trace(slow_rank).spans.query("stage == 'embed'").part)
    whole = 9 * 64 + (0 if embedding_is_split else 256 * 64)
    trace = lifetrace.read_trace(slow_rank)
    assert trace.steps.flops_dense.tolist() == [3_719_168 // 2, 340_992 // 2, 342_016 // 2, 343_040 // 2] * 2
    assert trace.meta["model"]["parameters"] == 180_800
    assert trace.meta["model"]["weight_bytes"] == (180_800 - whole) * 4 // 2 + whole * 4
    assert trace.steps.op_count.isna().all()
    assert any("shared out to several processes" in note for note in trace.meta["notes"])


def test_who_is_late_is_said(slow_rank):
    shown = CliRunner().invoke(main, ["show", str(slow_rank), "--json"])
    document = json.loads(shown.stdout)
    decode = {row["rank"]: row for row in document["ranks"] if row["phase"] == "decode"}
    assert decode[0]["share"] > 0.5 > decode[1]["share"]
    parts = {(row["stage"], row["part"]) for row in document["stages"] if row["phase"] == "decode"}
    assert {("layer", "communication"), ("lm_head", "communication")} <= parts
    text = " ".join(CliRunner().invoke(main, ["show", str(slow_rank)]).stdout.split())
    assert "In decode rank 1 keeps the others waiting" in text


def test_communication_lies_in_what_waits_for_it(slow_rank):
    """One sum behind the output projection and one behind the MLP, of each of four layers, in each of four steps."""
    spans = lifetrace.read_trace(slow_rank).spans
    spans = spans[(spans["rank"] == 0) & (spans.stage == "layer")]
    counts = spans.part.value_counts()
    assert (counts["attention.communication"], counts["mlp.communication"]) == (16, 16)
    assert spans[spans.part == "mlp.communication"].flops.tolist() == [0] * 16


def test_a_folder_of_runs_lists_the_run_once(slow_rank):
    assert lifetrace.analysis.trace.trace_folders(slow_rank.parent) == [slow_rank]


def test_the_recipe(tmp_path):
    """As the documentation has it, on the embedded model: a row of `show` for each of the two processes."""
    recipe = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (tmp_path / "several.py").write_text(recipe.partition("```py\n")[2].partition("```")[0])
    ended = two_processes(tmp_path / "several.py", ROOT / "tracer" / "demo_model", tmp_path / "t")
    assert ended.returncode == 0, ended.stderr
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "t")]).stdout
    rows = [line.split() for line in shown.splitlines() if " complete " in line]
    assert [row[0] for row in rows] == ["0", "1"]


def traced_as(monkeypatch, model, rank, out, job="mine", **how):
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("TORCHELASTIC_RUN_ID", job)):
        monkeypatch.setenv(name, str(value))
    with lifetrace.trace(model, out=out, **how) as trace:
        model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    return trace


def test_partitions_of_an_older_job_do_not_stay(model_r, tmp_path, monkeypatch):
    monkeypatch.setattr("lifetrace.ranks.PATIENCE_S", 0.1)
    for rank in (0, 1):
        traced_as(monkeypatch, model_r, rank, tmp_path / "t")
    old = lifetrace.read_trace(tmp_path / "t")
    assert [one.rank for one in old.ranks] == [0, 1]
    with pytest.raises(TraceError, match="not empty"):
        traced_as(monkeypatch, model_r, 0, tmp_path / "t")
    traced_as(monkeypatch, model_r, 0, tmp_path / "t", force=True)
    new = lifetrace.read_trace(tmp_path / "t")
    assert [one.rank for one in new.ranks] == [0]
    assert new.gaps == ["rank 1 left no trace: it was not traced, or ended before"]


def test_a_process_that_began_first_is_left_alone(model_r, tmp_path, monkeypatch):
    monkeypatch.setattr("lifetrace.ranks.PATIENCE_S", 0.1)
    (tmp_path / "t" / "rank-1").mkdir(parents=True)
    traced_as(monkeypatch, model_r, 0, tmp_path / "t")
    assert (tmp_path / "t" / "rank-1").is_dir()


def test_a_number_without_a_job_says_nothing(model_r, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(PROMPT, max_new_tokens=2, do_sample=False)
    assert (trace.path, trace.meta["rank"], trace.meta["world_size"], trace.meta["job"]) == (tmp_path / "t", 0, 1, None)


def test_a_process_of_another_job_keeps_out(model_r, tmp_path, monkeypatch):
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(PROMPT, max_new_tokens=2, do_sample=False)
        with pytest.raises(TraceError, match="this process is no part of it"):
            traced_as(monkeypatch, make_r(), 1, tmp_path / "t")
    assert [one.rank for one in trace.ranks] == [0]
    assert not list(tmp_path.glob("t/rank-*"))


def test_a_folder_without_rank_0_says_what_it_holds(model_r, tmp_path, monkeypatch):
    monkeypatch.setattr("lifetrace.ranks.PATIENCE_S", 0.1)
    traced_as(monkeypatch, model_r, 1, tmp_path / "t")
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "t")])
    assert shown.exit_code == 2
    assert "holds no trace of rank 0" in shown.stderr
    assert str(tmp_path / "t" / "rank-1") in shown.stderr.replace("\n", "")
    assert CliRunner().invoke(main, ["show", str(tmp_path / "t" / "rank-1")]).exit_code == 0


def test_several_processes_are_told_to_name_a_folder(model_r, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the same folder"):
        traced_as(monkeypatch, model_r, 0, None)


@pytest.mark.parametrize("other", [{"world_size": 1}, {"job": "another"}])
def test_a_partition_of_another_job_is_left_out(slow_rank, tmp_path, other):
    shutil.copytree(slow_rank, tmp_path / "t")
    file = tmp_path / "t" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | other))
    trace = lifetrace.read_trace(tmp_path / "t")
    assert [one.rank for one in trace.ranks] == [0]
    assert set(trace.steps["rank"]) == {0}


def test_a_rank_that_was_killed_is_named(tmp_path):
    """Rank 1 dies in its third forward; rank 0 waits for it, and ends with what torch or torchrun makes of that."""
    ended = model_r_shared_out(tmp_path, "killed")
    assert "Signal 9 (SIGKILL)" in ended.stderr
    trace = lifetrace.read_trace(tmp_path / "t")
    assert any(gap.startswith("rank 1: the run did not come to its end") for gap in trace.gaps)
    assert trace.ranks[1].meta["status"] == "running"
    assert trace.meta["status"] != "complete"
    assert CliRunner().invoke(main, ["show", str(tmp_path / "t")]).exit_code == 0
