"""`show`, `report` and `export`: what reads a stored trace, without torch."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from report_traces import judged

from lifetrace.cli import main


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def stored(tmp_path):
    return judged(tmp_path / "t").path


def test_perfetto_goes_into_the_trace_or_where_it_is_told(stored, tmp_path):
    inside = invoke("export", stored)
    assert (inside.exit_code, inside.stdout.strip()) == (0, str(stored / "perfetto.json"))
    told = invoke("export", stored, "--format", "perfetto", "-o", tmp_path / "x.json")
    assert told.stdout.strip() == str(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "png"], "--format png needs --figure: one of timeline"),
        (["--figure", "roofline"], "--format perfetto takes no --figure"),
        (["--format", "gif"], "'gif' is not one of"),
    ],
)
def test_an_export_that_cannot_be_says_why(stored, arguments, words):
    result = invoke("export", stored, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_an_export_of_no_trace(tmp_path):
    result = invoke("export", tmp_path)
    assert result.exit_code == 2
    assert "is no trace" in result.stderr


def test_show_in_each_format(stored):
    assert invoke("show", stored, "--format", "markdown").stdout.startswith("# m\n")
    assert invoke("show", stored, "--format", "csv").stdout.startswith("phase,stage,part,")
    assert invoke("show", stored, "--format", "json").stdout == invoke("show", stored, "--json").stdout
    assert "Decode is compute-bound" in invoke("show", stored, "--format", "text").stdout
    refused = invoke("show", stored, "--json", "--format", "csv")
    assert (refused.exit_code, "exclude each other" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    "arguments", [["report"], ["export"], ["show"], ["show", "--format", "markdown"], ["show", "--format", "csv"]]
)
def test_no_torch_is_loaded(stored, arguments):
    code = (
        "import sys\nfrom lifetrace.cli import main\n"
        f"main([{arguments[0]!r}, {str(stored)!r}, *{arguments[1:]!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
