"""The data that `report.js` draws from: small facts as JSON, columns as packed arrays."""

import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa
from markupsafe import Markup

from . import blocks
from .blocks import Array, SpanBlocks, StepTimes, codes, numbers
from .ceilings import Ceilings, of_manifest
from .cells import BOUNDS, CellVerdicts, cell_sum, cell_verdicts, working_sets
from .gallery import FIGURES
from .report_words import layer_count, plural, stop_word, visible
from .roofline import step_verdicts
from .trace import Trace

MAX_STEPS = 2_000
SLOWEST = 20
MAX_SPANS = 180_000
MAX_LAYOUTS = 64
MAX_TOKENS = 40_000
WORK = ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "kv_copy_bytes", "flops")
SPAN_COLUMNS = (
    "step", "span", "parent", "stage", "layer", "part", "module", "start_ns", "host_ns", "device_ns", "input_shape",
    "output_shape", "op_count", "starved", *dict.fromkeys((*WORK, *blocks.SPAN_BYTES)),
)  # fmt: skip
TOKEN_COLUMNS = (
    "rank", "call", "step", "sequence", "position", "token_id", "text", "source", "is_special", "kept", "arrival_ns",
    "logprob", "entropy",
)  # fmt: skip
CHARTS = ("timeline", "roofline", "heatmap", "efficiency", "kv-growth", "memory", "token-latency")


def page_data(trace: Trace, all_times: StepTimes) -> dict[str, Any]:
    """Everything that `report.js` draws from: small facts as JSON, columns as packed arrays."""
    rows = steps_in_page(all_times)
    steps, times = blocks.step_rows(trace), all_times.take(rows)
    ceilings, _ = of_manifest(trace.meta)
    beside = _beside(steps, all_times, rows) if len(rows) < len(all_times) else {}
    sets, steps = working_sets(trace)[rows], steps.take(pa.array(rows))
    return {
        "blocks": [[block.key, block.label, block.color] for block in times.blocks],
        "calls": _calls(trace, times),
        "steps": _steps(steps, times) | beside,
        "time": _pack(times.time_ns.astype(np.float32)),
        "layers": layer_count(trace),
        **_span_data(trace, times, sets, ceilings),
        "verdict": _step_verdicts(trace, times, ceilings),
        "tokens": _tokens(trace, times),
        "charts": {name: _chart(FIGURES[name](trace)) for name in CHARTS},
    }


def steps_in_page(times: StepTimes) -> Array:
    """Rows of the steps that the page holds: all, or the ends of each call, prefill, the slowest, and some between.

    The rest is spread evenly, so that the page of a long run is no larger than that of a short one.
    """
    count = len(times)
    if count <= MAX_STEPS:
        return np.arange(count)
    first = np.unique(times.call, return_index=True)[1]
    last = count - 1 - np.unique(times.call[::-1], return_index=True)[1]
    slowest = np.argsort(-times.wall_ns)[:SLOWEST]
    evenly = np.linspace(0, count - 1, MAX_STEPS).astype(np.int64)
    spread = evenly[np.argsort(np.modf(np.arange(len(evenly)) * 0.6180339887)[0])]
    order = np.concatenate([first, last, slowest, np.flatnonzero(times.prefill), spread])
    return np.sort(np.array(list(dict.fromkeys(order.tolist()))[:MAX_STEPS]))


def _beside(steps: pa.Table, times: StepTimes, rows: Array) -> dict[str, Any]:
    """What a page that leaves steps out knows of each step's place in its call, and of the step before it."""
    order = np.argsort(times.call, kind="stable")
    is_first = np.concatenate([[True], np.diff(times.call[order]) != 0])
    number, before = np.zeros(len(times), np.int64), np.full(len(times), -1)
    decodes = np.cumsum(~times.prefill[order])
    earlier = np.where(is_first, decodes - ~times.prefill[order], 0)
    number[order] = decodes - np.maximum.accumulate(earlier)
    before[order[1:]] = np.where(is_first[1:], -1, order[:-1])
    has_one, at = before[rows] >= 0, before[rows]
    return {
        "number": _pack(number[rows].astype(np.int32)),
        "before": _pack(np.where(has_one, times.step[at], -1).astype(np.int32)),
        "kv_before": _pack(np.where(has_one, numbers(steps, "kv_bytes")[at], 0.0)),
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
        "counted": _pack(times.counted.astype(np.uint8)),
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
        label = f"{kind} {index}" + (f", {plural(max(new), 'new token')}" if new else "")
        found.append(
            {
                "call": index,
                "label": label,
                "rows": _pack(rows.astype(np.int32)),
                "stop": [stop_word(str(reason)) if reason else None for reason in reasons],
            }
        )
    return found


def _span_data(trace: Trace, times: StepTimes, sets: Array, ceilings: Ceilings | None) -> dict[str, Any]:
    """Work and shapes of each block in each step, and the spans of as many steps as fit."""
    table = blocks.spans_of_steps(trace, times.step, SPAN_COLUMNS)
    spans = blocks.span_blocks(table, times.step)
    table = table.take(pa.array(spans.row))
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
        "bounds": _bounds(cell_verdicts(trace, table, cell, sets, len(times.blocks), ceilings)),
        "shapes": {
            "texts": texts + more,
            "input": _pack(_at_cell(cell[::-1], inputs[::-1], size).astype(np.int32)),
            "output": _pack(_at_cell(cell, outputs, size).astype(np.int32)),
        },
        "spans": _packed_spans(table, times, spans, place, np.stack([inputs, outputs])),
    }


def _work(table: pa.Table, name: str, cell: Array, size: int) -> dict[str, str] | None:
    """Sum of a column over each block of each step; null where the trace has none of it."""
    if np.isnan(numbers(table, name)).all():
        return None
    return _pack(cell_sum(table, name, cell, size).astype(np.float32))


def _bounds(found: CellVerdicts | None) -> dict[str, Any] | None:
    """The verdict of each block of each step, bounds as codes of `words`; null without ceilings."""
    if found is None:
        return None
    return {
        "words": BOUNDS,
        "bound": _pack(found.bound),
        "close_to": _pack(found.close_to),
        "roof_ns": _pack(found.roof_ns.astype(np.float32)),
        "efficiency": _pack(found.efficiency.astype(np.float32)),
    }


def _step_verdicts(trace: Trace, times: StepTimes, ceilings: Ceilings | None) -> dict[str, Any] | None:
    """The bound and efficiency of each whole step; null without ceilings."""
    if ceilings is None:
        return None
    by_step = {row.step: row.verdict for row in step_verdicts(trace, ceilings, set(times.step.tolist()))}
    judged = [by_step.get(step) for step in times.step.tolist()]
    bounds = [BOUNDS.index(row.bound) if row else 0 for row in judged]
    shares = [row.efficiency if row and row.efficiency is not None else np.nan for row in judged]
    return {"bound": _pack(np.array(bounds, np.int8)), "efficiency": _pack(np.array(shares, np.float32))}


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
    table = blocks.first_rank(trace.table("tokens", TOKEN_COLUMNS))
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
    logprob, entropy = numbers(table, "logprob"), numbers(table, "entropy")
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
        "entropy": None if np.isnan(entropy).all() else _pack(entropy.astype(np.float32)),
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


def json_block(data: dict[str, Any]) -> Markup:
    """JSON that can neither end its own <script> nor be read as anything but data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
