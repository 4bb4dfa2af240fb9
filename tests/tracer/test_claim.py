"""One writer a folder: a second is refused while the first lives, and a dead one blocks nobody."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
import torch

import lifetrace
from lifetrace.analysis.gaps import CLAIM, is_claimed
from lifetrace.claim import Claim
from lifetrace.errors import TraceError
from lifetrace.writer import claim_folder, prepare_folder

HOLDING = """
import sys
from pathlib import Path
from lifetrace.claim import Claim
claim = Claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that writes into the folder."""
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def test_another_process_is_refused_until_it_is_dead(tmp_path, other):
    assert is_claimed(tmp_path)
    for force in (False, True):
        with pytest.raises(TraceError, match="Another run is writing into"):
            prepare_folder(tmp_path, force)
    other.kill()
    other.wait()
    assert (tmp_path / CLAIM).exists()  # nobody tidied up
    assert not is_claimed(tmp_path)
    prepare_folder(tmp_path, force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_second_trace_of_this_process_is_refused(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t"):
        for force in (False, True):
            with pytest.raises(TraceError, match="Another run is writing into"):
                lifetrace.trace(model_r, out=tmp_path / "t", force=force)
        assert lifetrace.read_trace(tmp_path / "t").gaps == [
            "the run goes on still: counts and tokens come when it ends"
        ]
        model_r.generate(prompt_12, max_new_tokens=2)
    assert not (tmp_path / "t" / CLAIM).exists()
    assert lifetrace.read_trace(tmp_path / "t").gaps == []


def test_a_trace_that_could_not_begin_leaves_nothing(model_r, tmp_path):
    refused = pytest.raises(lifetrace.ModelError)
    with lifetrace.trace(model_r, out=tmp_path / "a"), refused, lifetrace.trace(model_r, out=tmp_path / "b"):
        pass
    assert list((tmp_path / "b").iterdir()) == []


def test_where_a_file_system_has_no_locks_the_file_is_the_claim(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    claim = claim_folder(tmp_path, force=False)
    assert is_claimed(tmp_path)
    with pytest.raises(TraceError, match=r"or was killed there.*or remove"):
        Claim(tmp_path)
    claim.release()
    claim_folder(tmp_path, force=False).release()


def test_a_claim_is_no_link_out_of_the_folder(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / CLAIM).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match="cannot be written"):
        prepare_folder(tmp_path / "t", force=True)
    assert not (tmp_path / "elsewhere").exists()


FORKING = """
import os, sys, warnings
import torch
sys.path.insert(0, sys.argv[2])
import killing, lifetrace
warnings.simplefilter("ignore")
model = killing.model_r()
with lifetrace.trace(model, out=sys.argv[1]) as trace:
    model.generate(killing.PROMPT, max_new_tokens=3)
    child = os.fork()
    model.generate(killing.PROMPT, max_new_tokens=4)
    if child == 0:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(len(trace.steps), trace.meta["status"])
"""


def test_a_fork_of_the_program_writes_nothing(tmp_path):
    support = os.path.join(os.path.dirname(__file__), "..", "support")
    command = [sys.executable, "-c", FORKING, str(tmp_path / "t"), support]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["5", "7", "complete"], ended.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(model_r, tmp_path):
    with pytest.raises(TraceError, match="cannot be written"):
        lifetrace.trace(model_r, out="/proc/lifetrace")
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="is a file"):
        lifetrace.trace(model_r, out=tmp_path / "file")


def test_a_folder_that_goes_away_leaves_the_program_alone(model_r, prompt_12, tmp_path):
    import shutil

    expected = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    with pytest.warns(UserWarning, match="No such file or directory"), lifetrace.trace(model_r, out=tmp_path / "t"):
        shutil.rmtree(tmp_path / "t")
        tokens = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, expected)
    meta = lifetrace.read_trace(tmp_path / "t").meta  # all that is left: the manifest that says so
    assert meta["status"] == "failed"
    assert "No such file or directory" in meta["error"]
