"""What a person reads in the terminal: units, dashes for what is missing, and no control codes from a model."""

import io

import pytest
from rich.console import Console
from stored_traces import one_call, write_trace

from lifetrace.analysis import read_trace, units
from lifetrace.analysis.summary import summarize
from lifetrace.analysis.terminal import print_summary, printable


def shown(path, width=100):
    console = Console(file=io.StringIO(), width=width)
    print_summary(summarize(read_trace(path)), console)
    return console.file.getvalue()


def test_times_and_shares_are_there(tmp_path):
    text = shown(one_call(tmp_path / "t"))
    for word in ("TTFT", "10.0 ms", "TPOT", "5.00 ms", "60.0%", "attention", "stopped by length"):
        assert word in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_keep_to_the_width(tmp_path, width):
    text = shown(one_call(tmp_path / "t"), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_a_model_cannot_steer_the_terminal(tmp_path):
    path = write_trace(tmp_path / "t", {}, output=["\x1b]0;owned\x07\x1b[31mred\u202e"], model={"id": "\x1b[2Jx"})
    text = shown(path)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[31mred" in text


def test_printable():
    assert printable("a\nb\tc é 日本 🦙") == "a\nb\tc é 日本 🦙"
    assert printable("\x00\x7f\u200f") == "\\x00\\x7f\\u200f"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1500, "1.50 µs"),
        (12_345_678, "12.3 ms"),
        (3.2e9, "3.20 s"),
        (1.5e12, "1,500 s"),
    ],
)
def test_time(value, text):
    assert units.time(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (12, "12 B"), (17_408, "17.4 kB"), (1_050_673_152, "1.05 GB")]
)
def test_bytes(value, text):
    assert units.byte_count(value) == text
