"""The report: one file, in a real browser without an error or a request, whatever a trace holds."""

import base64
import errno
import html
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plotly.offline import get_plotlyjs
from stored_traces import one_call

from lifetrace.analysis import figures, read_trace, report, schema
from lifetrace.analysis.trace import Trace
from lifetrace.errors import TraceError

MS = 1_000_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '</script><img src=x onerror="document.title=1"><b>\u202eRTL\u2028\x00\x1b</b>'
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def write_trace(folder: Path, meta: dict, **tables: list[dict] | pa.Table) -> Trace:
    """Write rows as a trace; what a row leaves out is null."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format_version": 1, "run_id": "r", "status": "complete"} | meta))
    for name, rows in tables.items():
        table = schema.TABLES[name]
        if isinstance(rows, list):
            full = [{column.name: row.get(column.name) for column in table.columns} for row in rows]
            rows = pa.Table.from_pylist(full, schema=table.schema)
        file = folder / name / "part-00000.parquet" if table.in_parts else folder / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(rows, file)
    return read_trace(folder)


def call_facts(call: int, prompt: int, new: int, first_step_ms: float, stop: str | None = "length") -> dict:
    start = int(first_step_ms * MS)
    return {
        "call": call, "kind": "generate", "repeat": call, "parent_step": None, "request_start_ns": start,
        "sequences": 1, "prompt_tokens": [prompt], "new_tokens": [new], "stop_reason": stop,
        "stop_reasons": [stop], "first_token_ns": start + 20 * MS, "last_token_ns": start + (20 + 10 * (new - 1)) * MS,
    }  # fmt: skip


def rows_of_call(call: int = 0, prompt: int = 3, new: int = 4, texts: list[str] | None = None) -> dict[str, list]:
    """Steps of 20 ms (prefill) and 10 ms, each with two layers of attention and MLP; and their tokens."""
    steps: list[dict] = []
    spans: list[dict] = []
    tokens: list[dict] = []
    words = texts or [f" w{i}" for i in range(prompt + new)]
    token = {"rank": 0, "call": call, "sequence": 0, "kept": True, "is_special": False}
    tokens += [
        token | {"step": call * new, "position": i, "token_id": i, "text": words[i], "source": "prompt"}
        for i in range(prompt)
    ]
    base = call * 1000
    for index in range(new):
        number, phase = call * new + index, "decode" if index else "prefill"
        start, wall = (base + 10 * index + 10 if index else base), 10 if index else 20
        common = {"rank": 0, "call": call, "step": number, "phase": phase}
        steps.append(common | {
            "repeat": call, "batch": 1, "q_len": 1 if index else prompt, "start_ns": start * MS,
            "kv_len_before": prompt + index - 1 if index else 0, "kv_len_after": prompt + index,
            "wall_ns": wall * MS, "forward_ns": (wall - 1) * MS, "prepare_ns": 0, "sample_ns": MS,
            "kv_bytes": 1000 * (prompt + index), "kv_allocated_bytes": 2000 * (prompt + index),
            "warmup": False, "discarded": False,
        })  # fmt: skip
        spans += spans_of_step(common, start, wall)
        position = prompt + index
        tokens.append(token | {
            "step": number, "position": position, "token_id": position, "text": words[position],
            "source": "generated", "arrival_ns": (start + wall) * MS,
        })  # fmt: skip
    return {"steps": steps, "spans": spans, "tokens": tokens}


def spans_of_step(common: dict, start: float, wall: float) -> list[dict]:
    layer = (wall - 3) / 2
    base = common["step"] * 100
    row = {key: common[key] for key in ("rank", "step", "phase")}
    parts = [("embed", None, None, None, start, 1.0), ("lm_head", None, None, None, start + wall - 2, 1.0)]
    parts += [("sample", None, None, None, start + wall - 1, 1.0)]
    for i in range(2):
        at, number = start + 1 + i * layer, base + len(parts)
        parts.append(("layer", i, None, None, at, layer))
        parts.append(("layer", i, "attention", number, at, layer / 2))
        parts.append(("layer", i, "mlp", number, at + layer / 2, layer / 2))
    return [
        row | {
            "span": base + n, "parent": parent, "stage": stage, "layer": i, "part": part,
            "module": f"model.{stage}", "start_ns": int(at * MS), "host_ns": int(ms * MS),
        }
        for n, (stage, i, part, parent, at, ms) in enumerate(parts)
    ]  # fmt: skip


def page_of(trace: Trace, folder: Path) -> str:
    return report.write_report(trace, folder / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def unpacked(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def browse(page: Path, profile: Path, *more: str) -> tuple[str, str]:
    """Open a page in headless Chromium; return the document that its script made, and the log."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               "--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={profile}",
               "--enable-logging=stderr", "--v=0", "--virtual-time-budget=5000", *more, "--dump-dom",
               page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, done.stderr


def console(log: str) -> list[str]:
    return [line for line in log.splitlines() if "CONSOLE" in line]


def small(folder: Path, **meta) -> Trace:
    return write_trace(
        folder, {"calls": [call_facts(0, 3, 4, 0)], "model": {"id": "m", "layers": 2}} | meta, **rows_of_call()
    )


# -- what the file is ------------------------------------------------------------------------


def test_one_file_that_asks_for_nothing(tmp_path):
    page = page_of(small(tmp_path / "t"), tmp_path)
    assert page.count(get_plotlyjs()) == 1
    rest = page.replace(get_plotlyjs(), "")
    assert not re.search(r"""(src|href|action|data)\s*=\s*["']?(https?:)?//""", rest)
    assert not re.search(r"@import|url\(", rest)
    assert "default-src 'none'" in rest
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["report.html"]


def test_headline_numbers_by_arithmetic(tmp_path):
    page = page_of(small(tmp_path / "t"), tmp_path)
    cards = dict(re.findall(r"<dt>([^<]+)</dt><dd><bdi>([^<]+)</bdi></dd><dd class=\"note\">", page))
    assert cards["Time to first token"] == "20.0 ms"
    assert cards["Time per output token"] == "10.0 ms"
    assert cards["Prefill"] == "150 tokens/s"  # 3 tokens in 20 ms
    assert cards["Decode"] == "100 tokens/s"
    assert cards["KV cache"] == "6.00 kB"
    assert cards["Stopped by"] == "token limit"
    assert cards["Tracing overhead"] == "–"
    assert "Prefill of 3 prompt tokens took 20.0 ms: 42% attention, 42% MLP" in page  # 2 × 4.25 of 20 ms each
    assert "Each of 3 decode steps took 10.0 ms (median): 35% attention, 35% MLP" in page


def test_overhead_and_quality_are_told(tmp_path):
    overhead = {"untraced_s": [1.0], "traced_s": [1.01], "ratio": 1.01, "ratio_low": 0.995, "ratio_high": 1.02}
    same = page_of(small(tmp_path / "a", overhead=overhead | {"tokens_identical": True}), tmp_path)
    assert "+1.0%" in same
    assert "-0.5% to +2.0%" in same
    assert "Tokens are identical" in same
    differ = page_of(small(tmp_path / "b", overhead=overhead | {"tokens_identical": False}), tmp_path)
    assert "Tokens differ" in differ
    killed = page_of(small(tmp_path / "c", status="running", notes=["something was missed"]), tmp_path)
    assert "was killed" in killed
    assert "something was missed" in killed


def test_data_holds_spans_and_work_where_known(tmp_path):
    rows = rows_of_call()
    for row in rows["spans"]:
        if row["part"] == "mlp":
            row |= {"flops": 500, "input_shape": [1, 1, 64], "output_shape": [1, 1, 64]}
    trace = write_trace(tmp_path / "t", {"calls": [call_facts(0, 3, 4, 0)]}, **rows)
    data = data_of(page_of(trace, tmp_path))
    assert data["work"]["weight_bytes"] is None
    keys = [block[0] for block in data["blocks"]]
    flops = unpacked(data["work"]["flops"]).reshape(4, len(keys))
    assert flops[:, keys.index("mlp")].tolist() == [1000] * 4
    assert np.isnan(flops[:, keys.index("attention")]).all()
    shapes = unpacked(data["shapes"]["output"]).reshape(4, len(keys))
    assert data["shapes"]["texts"][shapes[0, keys.index("mlp")]] == "1 × 1 × 64"
    assert len(data["spans"]["layouts"]) == 1
    assert len(unpacked(data["spans"]["ns"])) == len(rows["spans"])
    assert unpacked(data["tokens"]["waited_ns"])[3:].tolist() == [20 * MS, 10 * MS, 10 * MS, 10 * MS]


def test_spans_beyond_the_budget_stay_in_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_SPANS", 20)
    trace = small(tmp_path / "t")
    layout = unpacked(data_of(page_of(trace, tmp_path))["spans"]["layout"])
    assert layout[0] == 0  # the prefill comes first
    assert sorted(layout.tolist()) == [-2, -2, 0, 0]


def test_tokens_beyond_the_budget_are_left_out_prompt_first(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_TOKENS", 5)
    tokens = data_of(page_of(small(tmp_path / "t"), tmp_path))["tokens"]
    assert unpacked(tokens["position"]).tolist() == [2, 3, 4, 5, 6]
    assert tokens["left_out"] == 2


def test_modules_alike_are_counted_together(tmp_path):
    modules = [
        {"module": f"layers.{i}.q", "class_name": "Linear", "parameters": 10, "weight_bytes": 40, "dtype": "float32"}
        for i in range(3)
    ] + [{"module": "head", "class_name": "Linear", "tied_to": "embed", "parameters": 0}]
    trace = write_trace(tmp_path / "t", {}, modules=modules, **rows_of_call())
    page = page_of(trace, tmp_path)
    first, _ = report.module_rows(trace)
    assert (first.name, first.count, first.parameters) == ("layers.*.q", 3, 30)
    assert "tied to <bdi>embed</bdi>" in page


# -- writing ---------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_names_path_and_cause(tmp_path):
    trace = small(tmp_path / "t")
    with pytest.raises(TraceError, match=r"missing/report\.html cannot be written: No such file"):
        report.write_report(trace, tmp_path / "missing" / "report.html")


def test_a_full_disk_leaves_the_earlier_report(tmp_path, monkeypatch):
    trace = small(tmp_path / "t")
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TraceError, match="No space left"):
        report.write_report(trace, path)
    assert path.read_text() == "earlier"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["report.html"]


# -- hostile text ----------------------------------------------------------------------------


def hostile(folder: Path) -> Trace:
    words = [HOSTILE, "caf", "\ufffd", "\ufffd\ufffd", "\n", HOSTILE, "עברית"]
    rows = rows_of_call(texts=words)
    for row in rows["spans"]:
        row["module"] = HOSTILE
    meta = {
        "model": {"id": HOSTILE, "dtype": HOSTILE, "layers": 2}, "prompt": [HOSTILE, "\ud83d lone"],
        "output": [HOSTILE * 30], "notes": [HOSTILE], "error": HOSTILE, "command": HOSTILE,
        "calls": [call_facts(0, 3, 4, 0, f"criterion {HOSTILE}")], "versions": {HOSTILE: HOSTILE},
        "uncounted": [HOSTILE],
    }  # fmt: skip
    modules = [{"module": HOSTILE, "class_name": HOSTILE, "parameters": 1}]
    return write_trace(folder, meta, modules=modules, **rows)


def test_hostile_text_is_text(tmp_path):
    page = page_of(hostile(tmp_path / "t"), tmp_path).replace(get_plotlyjs(), "")
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "[U+202E]RTL" in page
    block = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert not set(block) & set("<>&\u2028\u2029")
    assert data_of(page)["tokens"]["texts"][0] == report.visible(HOSTILE)


@needs_browser
def test_hostile_text_runs_nothing_and_is_shown(tmp_path):
    path = report.write_report(hostile(tmp_path / "t"), tmp_path / "report.html")
    dom, log = browse(path, tmp_path / "profile", "--window-size=1400,1000")
    assert console(log) == []
    title = html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1])
    assert title.endswith("· lifetrace")
    assert not re.search(r"<img[^>]*onerror", re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL))
    strip = re.search(r'id="strip".*?</div>', dom, re.DOTALL)[0]
    assert "onerror=" in strip
    assert "&lt;img" in strip
    assert strip.count("◌") == 3


# -- a real browser --------------------------------------------------------------------------


@needs_browser
def test_the_page_draws_and_asks_for_nothing(tmp_path):
    path = report.write_report(small(tmp_path / "t"), tmp_path / "report.html")
    dom, log = browse(path, tmp_path / "profile", "--window-size=390,844")
    assert console(log) == []
    assert dom.count('class="main-svg"') >= 4
    assert "Prefill · 20.0 ms" in dom
    assert "all 3 positions go through every stage at once" in dom
    assert "KV cache after this step: 3 positions in 2 layers, 3.00 kB (+3.00 kB)." in dom
    assert re.search(r'<p class="loop" id="loop"><span>append', dom)
    # every stage of the map has its time: 8.5 of 20 ms each for attention and the MLP
    assert dom.count("<dt>8.50 ms</dt>") == 2


@needs_browser
def test_a_linked_step_is_shown(tmp_path):
    path = report.write_report(small(tmp_path / "t"), tmp_path / "report.html")
    frame = tmp_path / "frame.html"
    # the link's fragment cannot be given to --dump-dom by path alone: a redirecting page carries it
    frame.write_text(f'<meta http-equiv="refresh" content="0;url={path.as_uri()}#step=3">')
    dom, log = browse(frame, tmp_path / "profile", "--window-size=1400,1000")
    assert console(log) == []
    assert "Decode 3 · 10.0 ms" in dom
    assert "stops here: token limit" in dom


USE_EVERYTHING = """
const fire = (id, type, more) => document.getElementById(id).dispatchEvent(
  new (more && more.key ? KeyboardEvent : MouseEvent)(type, {bubbles: true, ...more}));
const box = document.getElementById("detail").getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + 40};
fire("next", "click"); fire("detail", "mousemove", at); fire("detail", "click", at);
for (const key of ["ArrowUp", "ArrowDown", "ArrowRight", "ArrowLeft", "Enter", "Escape", "ArrowRight"])
  fire("detail", "keydown", {key});
const readout = document.getElementById("readout").textContent;
fire("strip", "keydown", {key: "ArrowRight"});
document.querySelector("#strip .given").click();
const first = document.getElementById("where").textContent;
const call = document.getElementById("call");
call.value = 1; call.dispatchEvent(new Event("change"));
const slider = document.getElementById("step");
slider.value = 2; slider.dispatchEvent(new Event("input"));
fire("play", "click");
dispatchEvent(new Event("beforeprint")); dispatchEvent(new Event("afterprint")); dispatchEvent(new Event("resize"));
setTimeout(() => {
  document.body.dataset.seen = JSON.stringify([readout, first, document.getElementById("where").textContent]);
}, 2500);
"""


@needs_browser
def test_every_control_works(tmp_path):
    calls = [rows_of_call(call) for call in range(2)]
    rows = {name: [row for one in calls for row in one[name]] for name in calls[0]}
    facts = {"calls": [call_facts(call, 3, 4, 1000 * call) for call in range(2)]}
    path = report.write_report(write_trace(tmp_path / "t", facts, **rows), tmp_path / "report.html")
    used = tmp_path / "used.html"
    used.write_text(path.read_text().replace("</body>", f"<script>{USE_EVERYTHING}</script></body>"))
    dom, log = browse(used, tmp_path / "profile", "--window-size=1400,1000")
    assert console(log) == []
    readout, first, last = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', dom)[1]))
    assert "of the step" in readout
    assert first == "Prefill · 20.0 ms"  # the token that was clicked came from the prefill
    assert last == "Decode 3 · 10.0 ms"  # played to the end of the second call


def odd_traces(folder: Path) -> dict[str, Trace]:
    """Traces that lack something, by name."""
    whole = rows_of_call()
    meta = {"calls": [call_facts(0, 3, 4, 0)], "model": {"id": "m", "layers": 2}}
    layers = [row for row in whole["spans"] if row["part"] is None]
    prefill = {name: [row for row in rows if row["step"] == 0] for name, rows in whole.items()}
    many = [rows_of_call(call) for call in range(9)]
    cases: dict[str, tuple[dict, dict]] = {
        "no steps": ({}, {}),
        "no tokens": (meta, whole | {"tokens": []}),
        "no text": (meta, whole | {"tokens": [row | {"text": None} for row in whole["tokens"]]}),
        "no spans": (meta, whole | {"spans": []}),
        "whole layers only": (meta, whole | {"spans": layers}),
        "every second step": (meta, whole | {"spans": [row for row in whole["spans"] if row["step"] % 2 == 0]}),
        "prefill only": ({"calls": [call_facts(0, 3, 1, 0)]}, prefill),
        "one plain forward": ({"calls": [{"call": 0, "kind": "forward"}]}, prefill | {"tokens": []}),
        "empty generation": (
            {"calls": [call_facts(0, 3, 0, 0, None)]},
            {"tokens": [row for row in whole["tokens"] if row["source"] == "prompt"]},
        ),
        "killed": ({"status": "running", "calls": []}, whole | {"tokens": []}),
        "many calls": (
            {"calls": [call_facts(call, 3, 4, 1000 * call) for call in range(9)]},
            {name: [row for rows in many for row in rows[name]] for name in whole},
        ),
    }
    return {
        name: write_trace(folder / name.replace(" ", "-"), facts, **tables) for name, (facts, tables) in cases.items()
    }


def test_odd_traces_give_a_page(tmp_path):
    for name, trace in odd_traces(tmp_path).items():
        page = page_of(trace, tmp_path).partition("<script")[0].partition("</style>")[2]
        words = set(re.sub(r"<[^>]*>", " ", page).split())
        assert not words & {"NaN", "nan", "null", "None"}, name


@needs_browser
def test_odd_traces_open_without_an_error(tmp_path):
    frames = ""
    for name, trace in odd_traces(tmp_path).items():
        path = report.write_report(trace, tmp_path / f"{name.replace(' ', '-')}.html")
        frames += f'<iframe src="{path.as_uri()}" width="1200" height="900"></iframe>'
    page = tmp_path / "frames.html"
    page.write_text(frames)
    _, log = browse(page, tmp_path / "profile", "--window-size=1300,10000")
    assert console(log) == []


# -- size ------------------------------------------------------------------------------------


def long_trace(folder: Path, steps: int, layers: int) -> Trace:
    """A long run at block detail, built by column."""
    per_step = 4 + 6 * layers
    rng = np.random.default_rng(0)
    wall = per_step * 100_000
    number = np.arange(steps * per_step)
    inside = number % per_step
    place = (inside - 2) % 6
    layered = (inside >= 2) & (inside < per_step - 2)
    child = layered & (place >= 1) & (place <= 4)
    stage = np.where(layered, np.where(place == 5, "other", "layer"), "lm_head")
    part = np.array(["", "norm", "attention", "norm", "mlp", ""])[place]
    columns = {
        "rank": np.zeros(len(number)), "step": number // per_step, "span": number,
        "phase": np.where(number < per_step, "prefill", "decode"),
        "parent": pa.array(number - place, mask=~child), "stage": stage,
        "layer": pa.array((inside - 2) // 6, mask=~layered), "part": pa.array(part, mask=~child),
        "module": np.char.add("model.layers.module.", inside.astype(str)), "start_ns": number * 100_000,
        "host_ns": rng.integers(10_000, 90_000, len(number)), "flops": rng.integers(1, 10**9, len(number)),
    }  # fmt: skip
    spans = pa.table(
        {c.name: pa.array(columns[c.name]).cast(pa.string() if pa.types.is_dictionary(c.type) else c.type).cast(c.type)
         if c.name in columns else pa.nulls(len(number), c.type) for c in schema.SPANS.columns}
    )  # fmt: skip
    rows = [
        {"rank": 0, "call": 0, "step": i, "phase": "decode" if i else "prefill", "start_ns": i * wall,
         "wall_ns": wall, "kv_bytes": i, "kv_len_after": i + 1, "kv_len_before": i, "batch": 1, "q_len": 1}
        for i in range(steps)
    ]  # fmt: skip
    tokens = [
        {"rank": 0, "call": 0, "step": i, "sequence": 0, "position": i, "token_id": i, "text": f" word{i}",
         "source": "generated", "kept": True, "arrival_ns": (i + 1) * wall}
        for i in range(steps)
    ]  # fmt: skip
    return write_trace(folder, {}, steps=rows, spans=spans, tokens=tokens)


def test_a_thousand_steps_of_32_layers_stay_small_and_quick(tmp_path):
    trace = long_trace(tmp_path / "t", 1000, 32)
    began = time.perf_counter()
    path = report.write_report(trace, tmp_path / "report.html")
    assert time.perf_counter() - began < 20
    assert path.stat().st_size < 8_000_000
    assert len(figures.timeline(trace).data) < 12  # paths in the chart, however many steps


def test_what_is_no_ordinary_file_is_left_alone(tmp_path):
    trace = read_trace(one_call(tmp_path / "trace"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="no ordinary file"):
        report.write_report(trace, tmp_path / "pipe")
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    report.write_report(trace, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "real.html").read_text()[:200]
