"""The workflow of docs/gate.md: its shell lines, with the demo model and two sides that are this very lifetrace."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DOCUMENT = Path(__file__).parents[1] / "docs" / "gate.md"


def job():
    text = re.search(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1]
    return yaml.safe_load(text)["jobs"]["gate"]


def run_step(name, folder):
    """Run the lines of a step as a runner does: bash, ending at the first that fails."""
    (lines,) = (step["run"] for step in job()["steps"] if step.get("name") == name)
    environment = os.environ | {key: str(value) for key, value in job()["env"].items()}
    environment |= {"ROUNDS": "1", "OMP_NUM_THREADS": "1"}
    command = ["bash", "-e", "-o", "pipefail", "-c", lines]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Both sides traced."""
    folder = tmp_path_factory.mktemp("runner")
    for side in ("base", "head"):
        program = folder / side / ".venv" / "bin" / "lifetrace"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lifetrace "$@"\n')
        program.chmod(0o755)
    done = run_step("Trace", folder)
    assert done.returncode == 0, done.stderr
    return folder


def as_head(folder, change):
    """Let the head be the base with its manifest changed."""
    shutil.rmtree(folder / "traces" / "head")
    shutil.copytree(folder / "traces" / "base", folder / "traces" / "head")
    manifest = folder / "traces" / "head" / "1" / "run.json"
    document = json.loads(manifest.read_text())
    change(document)
    manifest.write_text(json.dumps(document))


def much_later(document):
    """Ten seconds to the first token and a minute to the last one more: far beyond any noise, which stays as it is."""
    for call in document["calls"]:
        call["first_token_ns"] += 10_000_000_000
        call["last_token_ns"] += 70_000_000_000


def of_another_model(document):
    document["model"]["parameters"] += 1


def test_both_sides_are_traced_alike(traced):
    for side in ("base", "head"):
        calls = json.loads((traced / "traces" / side / "1" / "run.json").read_text())["calls"]
        assert [(call["prompt_tokens"], len(call["new_tokens"])) for call in calls] == [([128], 1)] * 4


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda document: None, 0, "No regression above 5.0% beyond the noise"),
        (much_later, 1, "Regression above 5.0% beyond the noise: TTFT +"),
        (of_another_model, 2, "The gate cannot judge these runs: the runs are of another model"),
    ],
)
def test_the_gate_decides(traced, change, code, words):
    as_head(traced, change)
    done = run_step("Compare", traced)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert "Comparison of runs" in (traced / "comparison.html").read_text()


def test_the_workflow_names_what_the_shell_takes():
    uses = [step["uses"].partition("@")[0] for step in job()["steps"] if "uses" in step]
    assert uses == ["actions/checkout"] * 2 + ["actions/setup-python", "actions/upload-artifact"]
    paths = [step["with"]["path"] for step in job()["steps"][:2]]
    assert paths == ["base", "head"]
    kept = job()["steps"][-1]["with"]["path"].split()
    assert kept == ["comparison.html", "traces"]
