"""Text from strangers (prompts, tokens, names of models and modules) in every output: it is shown, and does nothing."""

import csv
import html.parser
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from stored_traces import one_call, write_trace
from transformers import LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace.analysis import schema
from lifetrace.cli import main
from reference_model import R_SIZES

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m"
MARKUP = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}[bold]x[/] `|*_[a](javascript:alert(3))'
FORMULAS = ("=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\t=1", "\r=1")
TEXT = f"{MARKUP}{ESCAPES}\u202egnp.exe\u2066"
# Columns whose words steer the readers; all other text columns hold what a stranger wrote.
STEERING = {"phase", "stage", "role", "source"}


@pytest.fixture
def hostile(tmp_path):
    """A trace with hostile text wherever text may stand."""
    folder = one_call(tmp_path / "t")
    tables = {}
    for table in schema.TABLES.values():
        file = folder / table.name / "part-00000.parquet"
        rows = pq.ParquetFile(file).read().to_pylist() if file.is_file() else []
        texts = [c.name for c in table.columns if pa.types.is_string(c.type) or pa.types.is_dictionary(c.type)]
        for row in rows:
            inside = row.get("parent") is not None  # a part's own row; the others have none
            row |= {name: TEXT for name in texts if name not in STEERING and (name != "part" or inside)}
        tables[table.name] = rows
    meta = json.loads((folder / "run.json").read_text())
    module = {"module": TEXT, "class_name": TEXT, "parameters": 1, "weight_bytes": 4, "dtype": TEXT, "device": TEXT}
    operator = {"step": 1, "phase": "decode", "stage": TEXT, "op": TEXT, "count": 1, "host_ns": 1}
    facts = {
        "run_id": TEXT, "status": TEXT, "error": TEXT, "command": TEXT, "created": TEXT,
        "model": {"id": TEXT, "architecture": TEXT, "dtype": TEXT, "attention": TEXT, "config": {TEXT: TEXT}},
        "device": {"type": "cpu", "name": TEXT}, "versions": {TEXT: TEXT}, "settings": {"detail": TEXT},
        "generation": {TEXT: TEXT}, "prompt": [TEXT], "output": [TEXT], "notes": [TEXT],
        "uncounted": [{"module": TEXT, "operators": [TEXT], "span": TEXT, "share_of_time": 0.5}],
    }  # fmt: skip
    calls = [meta["calls"][0] | {"stop_reason": TEXT, "stop_reasons": [TEXT], "error": TEXT}]
    tables["modules"] = [module | {"tied_to": TEXT}]
    tables["ops"] = [operator]
    return write_trace(tmp_path / "hostile", tables, calls=calls, **facts)


def invoke(*arguments):
    ended = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.mark.parametrize(
    "command",
    [["show"], ["show", "--format", "markdown"], ["show", "--format", "csv"], ["explain", "--step", "1"], ["compare"]],
)
def test_nothing_steers_the_terminal(hostile, command):
    shown = invoke(*command, hostile, *([hostile] if command == ["compare"] else []))
    assert [c for c in shown if not c.isprintable() and c not in "\n"] == []


def test_mistakes_do_not_steer_the_terminal_either(tmp_path):
    ended = CliRunner().invoke(main, ["show", str(tmp_path / ESCAPES)])
    assert "\x1b" not in ended.stderr
    assert "\\x1b" in ended.stderr


def test_markdown_holds_no_markup_of_a_stranger(hostile):
    shown = invoke("show", "--format", "markdown", hostile)
    assert "<script" not in shown
    assert re.search(r"(?<!\\)\]\(", shown) is None
    assert "&lt;script&gt;" in shown


class Tags(html.parser.HTMLParser):
    """What a page is made of: tags with the names of their attributes, and links."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.links = set(), set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags |= {(tag, name) for name, _ in attrs} | {(tag, None)}
        self.links |= {value for name, value in attrs if name in ("href", "src")}


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_page_is_made_of_our_own_tags_alone(hostile, tmp_path, command):
    benign = one_call(tmp_path / "benign")
    pages = []
    for folder in (benign, hostile):
        out = tmp_path / f"{folder.name}.html"
        invoke(command, *([benign] if command == "compare" else []), folder, "-o", out)
        pages.append(Tags(out.read_text(encoding="utf-8")))
    ours, found = pages
    assert not {tag for tag, _ in found.tags} & {"img", "iframe", "object", "base", "form"}
    assert not {name for _, name in found.tags if name and name.startswith("on")}
    assert {link for link in found.links if not link.startswith("#")} <= ours.links
    page = (tmp_path / "hostile.html").read_text(encoding="utf-8")
    assert page.count("</script") == (tmp_path / "benign.html").read_text(encoding="utf-8").count("</script")
    assert "\x1b" not in page


def test_json_and_perfetto_hold_the_text_itself(hostile, tmp_path):
    assert json.loads(invoke("show", "--json", hostile))["model"]["id"] == TEXT
    invoke("export", hostile, "-o", tmp_path / "p.json")
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert any(TEXT in str(event.get("args", {}).get("module")) for event in events)


def test_a_notebook_shows_text_as_text(hostile):
    page = lifetrace.read_trace(hostile)._repr_html_()
    assert "<script>alert" not in page
    assert "<img" not in page


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_spreadsheet_calculates_nothing(tmp_path, formula):
    folder = one_call(tmp_path / "t")
    rows = pq.ParquetFile(folder / "spans" / "part-00000.parquet").read().to_pylist()
    named = [row | {"part": formula if row["part"] == "mlp" else row["part"]} for row in rows]
    steps = pq.ParquetFile(folder / "steps" / "part-00000.parquet").read().to_pylist()
    shown = invoke("show", "--format", "csv", write_trace(tmp_path / "x", {"spans": named, "steps": steps}))
    cells = [cell for row in csv.reader(io.StringIO(shown)) for cell in row]
    assert any("1" in cell and formula.strip() in cell for cell in cells)
    assert [cell for cell in cells if cell[:1] in ("=", "+", "-", "@", "\t", "\r")] == []


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a\x00b", "\x1b[31mred", "con", "a" * 500, "模型", ""]
)
def test_a_models_name_makes_a_plain_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()
    model.config._name_or_path = name
    with lifetrace.trace(model) as trace:
        model.generate(torch.arange(3, 9)[None], max_new_tokens=1)
    assert trace.path.parent == Path("traces")
    assert trace.path.resolve().parent == tmp_path / "traces"
    assert trace.path.name.isascii()
    assert trace.path.name.isprintable()
    assert len(trace.path.name) < 100
    assert trace.meta["model"]["id"] == (name or "LlamaForCausalLM")
