"""The short forms of `benchmarks/endurance.py`: runs ended at random moments, and load."""

import subprocess
import sys
from pathlib import Path

import load

ROOT = Path(__file__).parents[2]


def test_a_run_that_is_ended_at_any_moment_reads_back():
    """In a process of its own, for each run is a fork of it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "endurance.py"), "kills", "--count", "6", "--seed", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "| SIGKILL | running | 1 |" in ended.stdout
    assert "| disk full |" in ended.stdout


def test_many_steps_open_no_file_and_begin_no_thread(tmp_path):
    taken = load.many_steps(1200, tmp_path / "t", looks=3, tokens=100)
    assert {(look.open_files, look.threads) for look in taken} == {(taken[0].open_files, taken[0].threads)}


def test_a_step_leaves_less_than_two_hundred_bytes_behind(tmp_path):
    """Of Python's own: 8 numbers for its tokens, 6 for its cache, 2 for its family, 2 for its place make 144."""
    grown = load.bytes_of_a_step(600, tmp_path / "t", tokens=200)
    assert 144 <= grown < 200


def test_many_threads_on_one_model_do_not_mix(tmp_path):
    assert load.many_threads(16, tmp_path / "t", tokens=8) == []


def test_many_traces_leave_no_file_open(tmp_path):
    taken = load.many_traces(8, tmp_path, looks=4)
    assert {look.open_files for look in taken} == {taken[0].open_files}
    before = load.open_files()
    load.many_readings(10, ROOT / "sample_traces" / "demo", looks=2)
    assert load.open_files() == before
