"""One HTML file that tells a trace: self-contained, no request to any network, nothing in it executed.

The page's words and tables are rendered here; its moving parts (the lifecycle map, the chosen
step, the tokens) are drawn by `report.js` from one block of packed arrays; the charts are those
of `figures`. Whatever a trace holds as text is shown as text: jinja2 escapes it in the page,
`_json_block` in the data, and the script sets it by `textContent` only.
"""

import base64
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lifetrace.errors import TraceError

from . import figures, units
from .breakdown import OWN, StageTime, breakdown
from .figures import Array, Block, SpanBlocks, StepTimes, codes, numbers
from .latency import Latency, latency
from .trace import Trace

MAX_SPANS = 180_000
MAX_LAYOUTS = 64
MAX_TOKENS = 40_000
LONG_TEXT = 700
WORK = ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "kv_copy_bytes", "flops")
CHARTS = ("timeline", "heat_map", "kv_growth", "token_latency")
STOPPED = {"eos": "end of text", "length": "token limit", "error": "an error", "unknown": "unknown"}
STATUS = {
    "running": "The run was killed, or is still going: what had been written until then is shown.",
    "interrupted": "The run was interrupted: the steps until then are shown.",
    "failed": "The run failed: the steps until then are shown.",
    "oom": "The run ended for want of memory: the steps until then are shown.",
}
DEFINITIONS = (
    ("TTFT", "Time to first token: arrival of the first token − request start. Median over the calls."),
    ("TPOT", "Time per output token: (last − first arrival) ÷ (tokens − 1). A dash for a single token."),
    ("p50, p95", "Percentiles of the times between consecutive tokens, over all calls."),
    ("Prefill tokens/s", "Prompt tokens (padding left out) ÷ wall time of the prefill steps."),
    ("Decode tokens/s", "All sequences' tokens after their first ÷ (last arrival − first arrival)."),
    ("Step", "One forward of the model, counted from 0 over the whole trace. Steps are not tokens: chunked "
     "prefill and assisted decoding break that."),
    ("Prefill, decode", "A step is prefill while its call has chosen no token yet; then it is decode."),
    ("Time of a stage", "Host time from its start to its end. Stages and the named gaps add up to the step's "
     "wall time. “Rest of the layers” is a layer's time outside its parts, such as residual adds."),
    ("KV filled, allocated", "Bytes of the positions held in the cache, and bytes of storage kept for them."),
    ("Weights, KV read", "The least traffic at a stage's boundary; parts need not add up to their layer."),
    ("FLOPs", "Matrix products, convolutions and attention, one multiply-add as 2, only the query–key pairs "
     "that causality and the window let through."),
    ("Overhead", "Traced time ÷ untraced time of the same work, alternated."),
    ("A dash", "Not measured, or not known. It is never zero."),
    ("kB, MB, GB", "10³, 10⁶, 10⁹ bytes."),
)  # fmt: skip


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Mark:
    """A statement on the quality of the trace; `kind` is `good`, `bad` or `plain`."""

    kind: str
    text: str


@dataclass(frozen=True)
class StageRow:
    """A stage or part, prefill beside decode. `step_ns` is the mean over the decode steps."""

    block: Block
    prefill: StageTime | None
    decode: StageTime | None
    step_ns: float | None


@dataclass(frozen=True)
class ModuleRow:
    """Modules alike in all but the numbers in their names."""

    name: str
    class_name: str
    count: int
    parameters: int | None
    weight_bytes: int | None
    dtype: str
    tied_to: str | None


def write_report(trace: Trace, path: Path) -> Path:
    """Write the report of a trace as one HTML file and return its path.

    Raises:
        TraceError: when the trace cannot be read, or the file cannot be written.
    """
    # a lone half of a surrogate pair may stand in a manifest, and has no place in UTF-8
    page = render_report(trace).encode("utf-8", "replace")
    path = Path(path).resolve() if Path(path).is_symlink() else Path(path)
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is no ordinary file; give -o the name of an HTML file to write.")
    try:
        _replace(path, page)
    except OSError as error:
        cause = error.strerror or error
        raise TraceError(f"The report {path} cannot be written: {cause}. Choose another place with -o.") from None
    return path


def render_report(trace: Trace) -> str:
    """Return the page as text."""
    times = figures.step_times(trace)
    numbers_ = latency(trace)
    rows = stage_rows(trace, times)
    page: str = _template().render(
        meta=trace.meta,
        title=visible(str((trace.meta.get("model") or {}).get("id") or "unnamed model")),
        facts=_facts(trace),
        marks=marks(trace),
        notes=[visible(str(note)) for note in trace.meta.get("notes") or []],
        prompts=_texts(trace, "prompt"),
        outputs=_texts(trace, "output"),
        long_text=LONG_TEXT,
        cards=cards(trace, numbers_, times),
        sentences=sentences(numbers_, times, rows),
        rows=rows,
        scale=max((cell.share for row in rows for cell in (row.prefill, row.decode) if cell), default=1.0),
        steps=len(times),
        has_spans=bool(times.has_spans.any()),
        has_tokens=len(trace.table("tokens")) > 0,
        layers=_layer_count(trace),
        modules=module_rows(trace),
        environment=_environment(trace),
        definitions=DEFINITIONS,
        units=units,
        data=_json_block(page_data(trace, times)),
        css=Markup(_asset("report.css")),
        js=Markup(_asset("report.js")),
        plotly=Markup(get_plotlyjs()),
    )
    return page


def visible(text: str) -> str:
    """Show control characters as pictures or names (␀, ␛, [U+202E]); line breaks and tabs are kept.

    The marks that turn the direction of the text around them are named too: isolation keeps them
    from the rest of the page, but not from disguising their own text.
    """
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", _picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"


# -- words and tables ------------------------------------------------------------------------


def cards(trace: Trace, numbers_: Latency, times: StepTimes) -> list[Card]:
    """The headline numbers, a dash where one was not measured."""
    calls = f"median of {numbers_.calls} calls" if numbers_.calls > 1 else "from the request's start"
    spread = f"p50 {units.time(numbers_.itl_p50_ns)}, p95 {units.time(numbers_.itl_p95_ns)}"
    model = trace.meta.get("model") or {}
    weight_bytes = model.get("weight_bytes")
    weights = f"{units.byte_count(weight_bytes)} of weights" if weight_bytes is not None else ""
    new = _plural(numbers_.new_tokens, "new token")
    return [
        Card("Time to first token", units.time(numbers_.ttft_ns), calls),
        Card("Time per output token", units.time(numbers_.tpot_ns), spread),
        Card(
            "Prefill",
            units.rate(numbers_.prefill_tokens_per_s, "tokens/s"),
            _plural(numbers_.prompt_tokens, "prompt token"),
        ),
        Card("Decode", units.rate(numbers_.decode_tokens_per_s, "tokens/s"), f"{new}, batch {_batch(numbers_)}"),
        _kv_card(trace),
        Card("Parameters", _large(model.get("parameters")), weights),
        _overhead_card(trace.meta.get("overhead")),
        _stop_card(trace),
    ]


def marks(trace: Trace) -> list[Mark]:
    """What a reader should know before trusting the numbers."""
    status = trace.meta.get("status")
    found = [Mark("bad", STATUS.get(str(status), f"Status: {status}."))] if status != "complete" else []
    if trace.meta.get("error"):
        found.append(Mark("bad", visible(str(trace.meta["error"]))))
    overhead = trace.meta.get("overhead") or {}
    if not overhead:
        found.append(Mark("plain", "No untraced run was made to compare with."))
    elif overhead.get("tokens_identical") is True:
        found.append(Mark("good", "Tokens are identical with and without tracing."))
    elif overhead.get("tokens_identical") is False:
        found.append(Mark("bad", "Tokens differ with and without tracing."))
    ranks = len(np.unique(numbers(trace.table("steps"), "rank")))
    if ranks > 1:
        found.append(Mark("plain", f"{ranks} processes shared the work; the pictures show the first."))
    if trace.meta.get("uncounted"):
        found.append(
            Mark("plain", "Some modules have no formula for their work: " + _uncounted(trace.meta["uncounted"]))
        )
    return found


def stage_rows(trace: Trace, times: StepTimes) -> list[StageRow]:
    """Where the time went, in lifecycle order, layers split into their parts where those were recorded."""
    found = breakdown(trace)
    parted = {row.phase for row in found if row.stage == "layer" and row.part is not None}
    cells: dict[str, dict[str, StageTime]] = {}
    for row in found:
        whole = row.part is None and not (row.stage == "layer" and row.phase in parted)
        if whole or (row.stage == "layer" and row.part is not None):
            key = row.stage if row.part in (None, OWN) else str(row.part)
            cells.setdefault(key, {})[row.phase] = row
    calls = max(len(np.unique(times.call)), 1)
    decode_steps = int((~times.prefill & times.has_spans).sum())
    return [
        StageRow(
            _named(block, bool(parted)),
            cells[block.key].get("prefill"),
            decode := cells[block.key].get("decode"),
            decode.time_ns * calls / decode_steps if decode and decode_steps else None,
        )
        for block in figures.ordered_blocks(set(cells))
    ]


def sentences(numbers_: Latency, times: StepTimes, rows: list[StageRow]) -> list[str]:
    """Where prefill and decode went, in a plain sentence each."""
    found = []
    prefill, decode = times.wall_ns[times.prefill], times.wall_ns[~times.prefill]
    if len(prefill):
        calls = len(np.unique(times.call[times.prefill]))
        of = f" of {_plural(numbers_.prompt_tokens, 'prompt token')}" if numbers_.prompt_tokens is not None else ""
        took = units.time(float(prefill.sum()) / calls)
        found.append(f"Prefill{of} took {took}{_where([(row.block.label, row.prefill) for row in rows])}")
    if len(decode):
        middle = units.time(float(np.median(decode)))
        what = f"Each of {len(decode):,} decode steps took" if len(decode) > 1 else "The one decode step took"
        found.append(f"{what} {middle} (median){_where([(row.block.label, row.decode) for row in rows])}")
    return found


def module_rows(trace: Trace) -> list[ModuleRow]:
    """Modules with parameters, those whose names differ only in numbers counted together."""
    columns = ["module", "class_name", "parameters", "weight_bytes", "dtype", "tied_to"]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in trace.table("modules").select(columns).to_pylist():
        name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row["module"] or "")
        groups.setdefault((name, row["class_name"], row["dtype"], row["tied_to"]), []).append(row)
    return [
        ModuleRow(
            name=visible(name),
            class_name=visible(class_name or ""),
            count=len(rows),
            parameters=_total(row["parameters"] for row in rows),
            weight_bytes=_total(row["weight_bytes"] for row in rows),
            dtype=dtype or "",
            tied_to=visible(tied_to) if tied_to else None,
        )
        for (name, class_name, dtype, tied_to), rows in groups.items()
    ]


def _kv_card(trace: Trace) -> Card:
    steps = figures.step_rows(trace)
    filled, held = numbers(steps, "kv_bytes"), numbers(steps, "kv_allocated_bytes")
    if not len(steps) or np.isnan(filled).all():
        return Card("KV cache", units.NONE, "not seen")
    most = int(np.nanargmax(filled))
    positions = numbers(steps, "kv_len_after")[most]
    note = "at its largest" if np.isnan(positions) else f"at {_plural(int(positions), 'position')}"
    if held[most] > filled[most]:
        note += f", {units.byte_count(held[most])} allocated"
    return Card("KV cache", units.byte_count(filled[most]), note)


def _overhead_card(overhead: dict[str, Any] | None) -> Card:
    ratio = (overhead or {}).get("ratio")
    if overhead is None or ratio is None:
        return Card("Tracing overhead", units.NONE, "no untraced run")
    low, high = overhead.get("ratio_low"), overhead.get("ratio_high")
    spread = f"{low - 1:+.1%} to {high - 1:+.1%}" if low is not None and high is not None else "traced ÷ untraced"
    return Card("Tracing overhead", f"{ratio - 1:+.1%}", spread)


def _stop_card(trace: Trace) -> Card:
    reasons = [str(call["stop_reason"]) for call in _measured_calls(trace) if call.get("stop_reason")]
    if not reasons:
        return Card("Stopped by", units.NONE, "not recorded")
    kinds = list(dict.fromkeys(reasons))
    note = f"and {len(kinds) - 1} other reasons" if len(kinds) > 1 else "each call" if len(reasons) > 1 else ""
    return Card("Stopped by", stop_word(kinds[0]), note)


def stop_word(reason: str) -> str:
    """Put a stop reason of the manifest into words."""
    if reason.startswith("criterion"):
        return visible(reason.removeprefix("criterion").strip() or "a stopping criterion")
    return STOPPED.get(reason, visible(reason))


def _where(cells: list[tuple[str, StageTime | None]]) -> str:
    """`: 54% MLP, 24% attention.` of the shares worth naming, largest first."""
    largest = sorted((c.share, label) for label, c in cells if c is not None and c.share >= 0.05)[:-4:-1]
    return ": " + ", ".join(f"{share:.0%} {label}" for share, label in largest) + "." if largest else "."


def _named(block: Block, parted: bool) -> Block:
    """A layer whose parts were not recorded is no rest of anything."""
    return block if parted or block.key != "layer" else Block(block.key, "decoder layers", block.color)


def _facts(trace: Trace) -> list[tuple[str, str]]:
    model, device, versions = (trace.meta.get(key) or {} for key in ("model", "device", "versions"))
    name = " ".join(str(device[key]) for key in ("name", "type") if device.get(key))
    if device.get("threads"):
        name += f", {_plural(device['threads'], 'thread')}"
    pairs = [
        ("device", name),
        ("dtype", model.get("dtype")),
        ("attention", model.get("attention")),
        ("layers", model.get("layers")),
        ("architecture", model.get("architecture")),
        ("detail", (trace.meta.get("settings") or {}).get("detail")),
        *((key, versions.get(key)) for key in ("torch", "transformers", "lifetrace")),
        ("recorded", str(trace.meta.get("created") or "").replace("T", " ")[:16]),
    ]
    return [(label, visible(str(value))) for label, value in pairs if value not in (None, "")]


def _environment(trace: Trace) -> list[tuple[str, str]]:
    """The manifest's plain facts, flattened; the prompt, output and calls are shown elsewhere."""
    shown = {key: trace.meta.get(key) for key in ("run_id", "command", "created", "status", "device", "versions")}
    shown |= {key: trace.meta.get(key) for key in ("model", "settings", "generation", "ceilings", "overhead")}
    return [(visible(name), visible(value)) for name, value in _flat(shown, "")]


def _flat(value: Any, name: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif value is not None and value != []:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _texts(trace: Trace, key: str) -> list[str]:
    """The prompts or outputs of the manifest, else what the first measured call's tokens spell."""
    stored = trace.meta.get(key)
    if stored:
        return [visible(str(text)) for text in ([stored] if isinstance(stored, str) else stored)]
    tokens = trace.table("tokens").select(["call", "sequence", "position", "text", "source", "kept", "is_special"])
    source = "prompt" if key == "prompt" else "generated"
    first = _first_call(trace)
    texts: dict[int, list[str]] = {}
    for row in tokens.sort_by([("sequence", "ascending"), ("position", "ascending")]).to_pylist():
        if row["call"] == first and row["source"] == source and row["kept"] is not False and row["text"] is not None:
            texts.setdefault(row["sequence"], []).append("" if row["is_special"] else row["text"])
    return [visible("".join(parts)) for parts in texts.values()]


def _first_call(trace: Trace) -> int | None:
    calls = figures.step_rows(trace)["call"].to_pylist()
    return calls[0] if calls else None


def _measured_calls(trace: Trace) -> list[dict[str, Any]]:
    """Top-level calls of the manifest whose steps count."""
    counted = set(figures.step_rows(trace)["call"].to_pylist())
    return [c for c in trace.meta.get("calls") or [] if c.get("call") in counted and c.get("parent_step") is None]


def _layer_count(trace: Trace) -> int:
    stored = (trace.meta.get("model") or {}).get("layers")
    if isinstance(stored, int):
        return stored
    return len(figures.layer_times(trace)[1])


def _batch(numbers_: Latency) -> str:
    return units.count(numbers_.sequences)


def _plural(count: int | None, noun: str) -> str:
    return f"{units.count(count)} {noun}" + ("" if count == 1 else "s")


def _large(count: int | None) -> str:
    if count is None:
        return units.NONE
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{units.significant(count / scale, 4)} {unit}"
    return str(count)


def _total(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _uncounted(modules: Any) -> str:
    names = [str(item.get("module", item)) if isinstance(item, dict) else str(item) for item in modules]
    return visible(", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") + ".")


# -- data for the script ---------------------------------------------------------------------


def page_data(trace: Trace, times: StepTimes) -> dict[str, Any]:
    """Everything that `report.js` draws from: small facts as JSON, columns as packed arrays."""
    steps = figures.step_rows(trace)
    spans = figures.span_blocks(trace, times.step)
    return {
        "blocks": [[block.key, block.label, block.color] for block in times.blocks],
        "calls": _calls(trace, times),
        "steps": _steps(steps, times),
        "time": _pack(times.time_ns.astype(np.float32)),
        "layers": _layer_count(trace),
        **_span_data(trace, times, spans),
        "tokens": _tokens(trace, times),
        "charts": {name: _chart(getattr(figures, name)(trace)) for name in CHARTS},
    }


def _steps(steps: pa.Table, times: StepTimes) -> dict[str, Any]:
    names = (
        "batch",
        "q_len",
        "kv_len_before",
        "kv_len_after",
        "kv_bytes",
        "kv_allocated_bytes",
        "kv_write_bytes",
    )
    columns = {name: _pack(numbers(steps, name)) for name in names}
    return columns | {
        "step": _pack(times.step.astype(np.int32)),
        "prefill": _pack(times.prefill.astype(np.uint8)),
        "start_ns": _pack(times.start_ns),
        "wall_ns": _pack(times.wall_ns),
    }


def _calls(trace: Trace, times: StepTimes) -> list[dict[str, Any]]:
    """The calls to choose from, each with the rows of its steps; calls may run at once and interleave."""
    known = {call.get("call"): call for call in trace.meta.get("calls") or []}
    found = []
    for index in dict.fromkeys(times.call.astype(np.int64).tolist()):
        rows = np.flatnonzero(times.call == index)
        facts = known.get(index, {})
        kind = "forward" if facts.get("kind") == "forward" else "call"
        reasons = facts.get("stop_reasons") or [facts.get("stop_reason")]
        new = facts.get("new_tokens")
        label = f"{kind} {index}" + (f", {_plural(max(new), 'new token')}" if new else "")
        found.append(
            {
                "call": index,
                "label": label,
                "rows": _pack(rows.astype(np.int32)),
                "stop": [stop_word(str(reason)) if reason else None for reason in reasons],
            }
        )
    return found


def _span_data(trace: Trace, times: StepTimes, spans: SpanBlocks) -> dict[str, Any]:
    """Work and shapes of each block in each step, and the spans of as many steps as fit."""
    table = figures.first_rank(trace.table("spans")).take(pa.array(spans.row))
    inputs, texts = _shapes(table, "input_shape")
    outputs, more = _shapes(table, "output_shape")
    outputs = np.where(outputs >= 0, outputs + len(texts), -1)
    column = {block.key: i for i, block in enumerate(times.blocks)}
    place = np.array([column.get(block.key, -1) for block in spans.blocks] + [-1])[spans.block]
    size = len(times) * len(times.blocks)
    cell = spans.step * len(times.blocks) + place
    cell[place < 0] = size
    return {
        "work": {name: _work(table, name, cell, size) for name in WORK},
        "shapes": {
            "texts": texts + more,
            "input": _pack(_at_cell(cell[::-1], inputs[::-1], size).astype(np.int32)),
            "output": _pack(_at_cell(cell, outputs, size).astype(np.int32)),
        },
        "spans": _packed_spans(table, times, spans, place, np.stack([inputs, outputs])),
    }


def _work(table: pa.Table, name: str, cell: Array, size: int) -> dict[str, str] | None:
    """Sum of a column over each block of each step; NaN, a dash, where part of it is not known."""
    values = numbers(table, name)
    if np.isnan(values).all():
        return None
    ran = np.bincount(cell, minlength=size + 1)[:size] > 0
    total = np.bincount(cell, weights=values, minlength=size + 1)[:size]
    return _pack(np.where(ran, total, np.nan).astype(np.float32))


def _at_cell(cell: Array, values: Array, size: int) -> Array:
    """The last value of each cell, -1 where it has none."""
    found = np.full(size + 1, -1)
    found[cell] = values
    return found[:size]


def _shapes(table: pa.Table, name: str) -> tuple[Array, list[str]]:
    """Codes of a column of shapes (-1 for null), and each distinct shape as text."""
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if column.null_count == len(column):
        return np.full(len(column), -1), []
    lengths = np.where(column.is_valid().to_numpy(False), np.diff(column.offsets.to_numpy()), -1)
    table_ = np.full((len(column), int(lengths.max()) + 1), -1, dtype=np.int64)
    table_[:, 0] = lengths
    wide = np.arange(table_.shape[1] - 1) < lengths[:, None]
    table_[:, 1:][wide] = column.flatten().to_numpy()
    distinct, code = np.unique(table_, axis=0, return_inverse=True)
    texts = [" × ".join(map(str, row[1 : 1 + row[0]])) or "scalar" for row in distinct.tolist() if row[0] >= 0]
    return code.reshape(-1) - (len(distinct) - len(texts)), texts


def _packed_spans(
    table: pa.Table,
    times: StepTimes,
    spans: SpanBlocks,
    place: Array,
    shapes: Array,
) -> dict[str, Any]:
    """Spans of the kept steps: their layout once for all steps alike, start and time for each.

    `layout` is -1 for a step without spans, -2 for one whose spans stay in the trace only.
    A start is a fraction of the step in 1/65535, enough to draw it; a time is exact.
    """
    names, words = _span_names(table)
    edges = np.searchsorted(spans.step, np.arange(len(times) + 1))
    columns = np.stack([np.zeros_like(names), place, names, np.nan_to_num(numbers(table, "layer"), nan=-1), *shapes])
    columns[0] = np.where(spans.parent >= 0, spans.parent - edges[spans.step], -1)
    columns = columns.astype(np.int32)
    layouts: dict[bytes, int] = {}
    layout = np.full(len(times), -1, dtype=np.int32)
    for index in _steps_that_fit(times, np.diff(edges)):
        key = columns[:, edges[index] : edges[index + 1]].tobytes()
        layout[index] = layouts.setdefault(key, len(layouts)) if key in layouts or len(layouts) < MAX_LAYOUTS else -2
    layout[(layout == -1) & (np.diff(edges) > 0)] = -2
    kept = layout[spans.step] >= 0
    start = (numbers(table, "start_ns") - times.start_ns[spans.step]) / np.maximum(times.wall_ns[spans.step], 1)
    counts = np.where(layout >= 0, np.diff(edges), 0)
    return {
        "words": words,
        "layouts": [_pack(np.frombuffer(key, np.int32)) for key in layouts],
        "layout": _pack(layout),
        "first": _pack(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        "at": _pack((np.clip(start[kept], 0, 1) * 65535).astype(np.uint16)),
        "ns": _pack(numbers(table, "host_ns")[kept].astype(np.float32)),
    }


def _span_names(table: pa.Table) -> tuple[Array, list[str]]:
    """A code of what to call each span, its module or else its part or stage, and the names."""
    words: list[str] = []
    names = np.full(len(table), -1)
    for column in ("module", "part", "stage"):
        code, texts = codes(table, column)
        names = np.where((names < 0) & (code >= 0), code + len(words), names)
        words += [visible(text) for text in texts]
    return names, words


def _steps_that_fit(times: StepTimes, counts: Array) -> list[int]:
    """Steps whose spans go into the page: all, or prefill, the slowest, and the rest evenly spread."""
    recorded = np.flatnonzero(counts)
    if counts.sum() <= MAX_SPANS:
        return [int(index) for index in recorded]
    slowest = recorded[np.argsort(-times.wall_ns[recorded])][:20]
    spread = recorded[np.argsort(np.modf(np.arange(len(recorded)) * 0.6180339887)[0])]
    wanted = dict.fromkeys([*recorded[times.prefill[recorded]].tolist(), *slowest.tolist(), *spread.tolist()])
    order = np.array(list(wanted))
    return sorted(int(index) for index in order[np.cumsum(counts[order]) <= MAX_SPANS])


def _tokens(trace: Trace, times: StepTimes) -> dict[str, Any]:
    """Tokens in order of call, sequence and position, each with the time since the one before."""
    table = figures.first_rank(trace.table("tokens"))
    kept = np.asarray(table["kept"].fill_null(True).to_numpy()).astype(bool)
    table = table.filter(pa.array(kept & np.isin(numbers(table, "call"), times.call)))
    table = table.sort_by([("call", "ascending"), ("sequence", "ascending"), ("position", "ascending")])
    source, words = codes(table, "source")
    generated = np.array([word == "generated" for word in words] + [False])[source]
    waited = _waited(trace, table)
    fitting = _tokens_that_fit(generated)
    left_out = len(table) - len(fitting)
    table, generated, waited = table.take(pa.array(fitting)), generated[fitting], waited[fitting]
    text, texts = codes(table, "text")
    logprob = numbers(table, "logprob")
    return {
        "call": _pack(numbers(table, "call").astype(np.int32)),
        "sequence": _pack(numbers(table, "sequence").astype(np.int32)),
        "step": _pack(np.nan_to_num(numbers(table, "step"), nan=-1).astype(np.int32)),
        "position": _pack(numbers(table, "position").astype(np.int32)),
        "id": _pack(np.nan_to_num(numbers(table, "token_id"), nan=-1).astype(np.int32)),
        "text": _pack(text.astype(np.int32)),
        "texts": [visible_token(word) for word in texts],
        "generated": _pack(generated.astype(np.uint8)),
        "special": _pack((np.nan_to_num(numbers(table, "is_special")) > 0).astype(np.uint8)),
        "waited_ns": _pack(waited.astype(np.float32)),
        "logprob": None if np.isnan(logprob).all() else _pack(logprob.astype(np.float32)),
        "left_out": left_out,
    }


def visible_token(text: str) -> str:
    """A token's text with control characters, line breaks and tabs included, as their pictures."""
    return visible(text).replace("\n", "⏎\n").replace("\t", "⇥\t")


def _tokens_that_fit(generated: Array) -> Array:
    """Rows that go into the page: all, or the generated and then the last of the prompt."""
    order = np.lexsort((-np.arange(len(generated)), ~generated))
    return np.sort(order[:MAX_TOKENS])


def _waited(trace: Trace, table: pa.Table) -> Array:
    """Time since the token before in its sequence; of the first, since the request's start."""
    call, sequence, arrival = (numbers(table, name) for name in ("call", "sequence", "arrival_ns"))
    waited = np.full(len(table), np.nan)
    if not len(table):
        return waited
    waited[1:] = np.where((call[1:] == call[:-1]) & (sequence[1:] == sequence[:-1]), np.diff(arrival), np.nan)
    starts = {facts.get("call"): facts.get("request_start_ns") for facts in trace.meta.get("calls") or []}
    request = np.array([starts.get(int(one)) for one in call], dtype=np.float64)
    return np.where(np.isnan(waited), arrival - request, waited)


def _chart(figure: Any) -> dict[str, Any]:
    chart: dict[str, Any] = json.loads(figure.to_json(validate=False))
    return chart


def _pack(values: Array) -> dict[str, str]:
    """An array in Plotly's own notation: its type and its little-endian bytes in base 64."""
    whole = values.dtype == np.float64 and bool((np.abs(values) < 2**31).all())
    if whole and bool((values == np.floor(values)).all()):
        values = values.astype(np.int32)
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str[1:], "bdata": base64.b64encode(little.tobytes()).decode("ascii")}


def _json_block(data: dict[str, Any]) -> Markup:
    """JSON that can neither end its own <script> nor be read as anything but data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# -- the file --------------------------------------------------------------------------------


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("report.html"))


def _replace(path: Path, content: bytes) -> None:
    """Write beside the file, then move into its place: a reader never sees half a report."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
