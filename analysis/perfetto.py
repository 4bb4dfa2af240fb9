"""A trace as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

The format is Google's "Trace Event Format": slices of type `X` with `ts` and `dur` in µs, counters
`C`, instants `i`, names of tracks as metadata `M`. Slices of one track must nest, so calls that ran
at once have tracks of their own. Events are written one by one; no list of them is ever held.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .blocks import Array, numbers
from .files import replacing
from .trace import Trace

Event = dict[str, Any]
BATCH = 4096
STEPS, HOST, DEVICE, TOKENS = 1, 2, 3, 4
TRACKS = {STEPS: "steps", HOST: "stages, host", DEVICE: "stages, device (in order of launch)", TOKENS: "tokens"}
KINDS = 10  # numbers of tracks that one lane may take
FIRST_PROCESS = 1  # readers take process 0 for the idle one
STEP_ARGS = (
    "call", "step", "phase", "role", "batch", "q_len", "kv_len_before", "kv_len_after", "token_count", "wall_ns",
    "flops", "op_count", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes",
)  # fmt: skip
SPAN_ARGS = (
    "step", "layer", "part", "module", "class_name", "host_ns", "device_ns", "input_shape", "output_shape", "dtype",
    "flops", "op_count", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "input_bytes", "output_bytes",
)  # fmt: skip
COUNTERS = {
    "KV cache, bytes": {"filled": "kv_bytes", "allocated": "kv_allocated_bytes"},
    "allocated memory, bytes": {"in use": "mem_allocated_bytes", "reserved": "mem_reserved_bytes"},
    "resident memory, bytes": {"process": "rss_bytes"},
}


def write_perfetto(trace: Trace, path: Path) -> Path:
    """Write the trace's events as one JSON file and return its path.

    Raises:
        TraceError: the trace cannot be read, or the file cannot be written.
    """
    model = (trace.meta.get("model") or {}).get("id")
    other = {"run_id": trace.meta.get("run_id"), "model": model, "created": trace.meta.get("created")}
    with replacing(path, "export") as file:
        file.write(b'{"displayTimeUnit":"ns","otherData":' + _json(other) + b',"traceEvents":[\n')
        for number, event in enumerate(events(trace)):
            file.write((b",\n" if number else b"") + _json(event))
        file.write(b"\n]}\n")
    return path


def events(trace: Trace) -> Iterator[Event]:
    """All events of a trace: names of tracks first, then each track's in the order of time."""
    clock = _Clock.of(trace)
    lanes = call_lanes(trace.table("steps"))
    yield from _names(trace, lanes)
    yield from _steps(trace, clock, lanes)
    yield from _host(trace, clock, lanes)
    yield from _device(trace, clock, lanes)
    yield from _counters(trace, clock)
    yield from _tokens(trace, clock, lanes)


@dataclass(frozen=True)
class _Clock:
    """Turns ns of the trace into µs since its first event, exact to the ns."""

    base_ns: int

    @classmethod
    def of(cls, trace: Trace) -> "_Clock":
        starts = [pc.min(trace.table(name)["start_ns"]).as_py() for name in ("steps", "spans")]
        return cls(min((start for start in starts if start is not None), default=0))

    def us(self, ns: int) -> float:
        return (ns - self.base_ns) / 1000


def call_lanes(steps: pa.Table) -> dict[tuple[int, int], int]:
    """A lane for each call of each rank, so that the calls of one lane never overlap in time.

    A forward inside another step belongs to that step's call or runs within its time: it takes the
    lane of the outer step.
    """
    columns = ["rank", "call", "step", "parent_step", "start_ns", "wall_ns"]
    ends: dict[tuple[int, int], list[int]] = {}
    outer = {}
    for row in steps.select(columns).to_pylist():
        if row["start_ns"] is None or row["call"] is None:
            continue
        key = (row["rank"] or 0, row["call"])
        outer[row["step"]] = key
        if row["parent_step"] is None:
            begun = ends.setdefault(key, [row["start_ns"], 0])
            begun[0] = min(begun[0], row["start_ns"])
            begun[1] = max(begun[1], row["start_ns"] + (row["wall_ns"] or 0))
    lanes: dict[tuple[int, int], int] = {}
    free: dict[int, list[int]] = {}
    for key, (start, end) in sorted(ends.items(), key=lambda item: item[1]):
        busy = free.setdefault(key[0], [])
        lane = next((number for number, until in enumerate(busy) if until <= start), len(busy))
        busy[lane : lane + 1] = [end]
        lanes[key] = lane
    for row in steps.select(columns).to_pylist():
        key = (row["rank"] or 0, row["call"])
        if key not in lanes and row["parent_step"] in outer:
            lanes[key] = lanes.get(outer[row["parent_step"]], 0)
    return lanes


def _names(trace: Trace, lanes: dict[tuple[int, int], int]) -> Iterator[Event]:
    model = (trace.meta.get("model") or {}).get("id") or "model"
    on_device = trace.table("spans")["device_ns"].drop_null()
    tracks = {kind: name for kind, name in TRACKS.items() if kind != DEVICE or len(on_device)}
    for rank in sorted({rank for rank, _ in lanes} or {0}):
        yield _metadata("process_name", rank, 0, f"rank {rank}: {model}")
        for lane in sorted({lane for (of, _), lane in lanes.items() if of == rank} or {0}):
            for kind, name in tracks.items():
                more = f", calls at once {lane + 1}" if lane else ""
                yield _metadata("thread_name", rank, lane * KINDS + kind, name + more)


def _metadata(kind: str, rank: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": rank + FIRST_PROCESS, "tid": track, "ts": 0, "args": {"name": name}}


def _steps(trace: Trace, clock: _Clock, lanes: dict[tuple[int, int], int]) -> Iterator[Event]:
    steps = trace.table("steps")
    nesting = _Nesting()
    for row in _rows(steps, ["rank", "start_ns", *STEP_ARGS], _order(steps, "wall_ns", "step")):
        if row["start_ns"] is None or row["wall_ns"] is None:
            continue
        track = (_process(row), _lane(lanes, row["rank"], row["call"]) * KINDS + STEPS)
        name = f"{row['phase']} {row['step']}"
        yield nesting.slice(clock, track, name, row["start_ns"], row["wall_ns"], _known(row, STEP_ARGS))


def _host(trace: Trace, clock: _Clock, lanes: dict[tuple[int, int], int]) -> Iterator[Event]:
    spans, lane_of = trace.table("spans"), _lane_of_steps(trace, lanes)
    nesting = _Nesting()
    columns = ["rank", "start_ns", "stage", *SPAN_ARGS]
    for row in _rows(spans, columns, _order(spans, "host_ns", "span")):
        if row["start_ns"] is None or row["host_ns"] is None:
            continue
        track = (_process(row), lane_of.get((row["rank"], row["step"]), 0) * KINDS + HOST)
        yield nesting.slice(clock, track, _name(row), row["start_ns"], row["host_ns"], _known(row, SPAN_ARGS))


def _device(trace: Trace, clock: _Clock, lanes: dict[tuple[int, int], int]) -> Iterator[Event]:
    """The top-level stages on the device's own track.

    How long the device was busy with a stage is measured, when it began is not: a stage begins
    when it was launched or when the stage before it is done, whichever is later.
    """
    spans = trace.table("spans")
    top = spans.filter(spans["parent"].is_null()) if len(spans) else spans
    top = top.filter(top["device_ns"].is_valid())
    lane_of = _lane_of_steps(trace, lanes)
    free_at: dict[tuple[int, int], int] = {}
    for row in _rows(top, ["rank", "start_ns", "stage", *SPAN_ARGS], _order(top, "device_ns", "span")):
        track = (_process(row), lane_of.get((row["rank"], row["step"]), 0) * KINDS + DEVICE)
        start = max(row["start_ns"], free_at.get(track, 0))
        free_at[track] = start + row["device_ns"]
        args = _known(row, SPAN_ARGS) | {"start": "placed"}
        yield _slice(clock, track, _name(row), start, row["device_ns"], args)


def _counters(trace: Trace, clock: _Clock) -> Iterator[Event]:
    columns = [column for series in COUNTERS.values() for column in series.values()]
    steps = trace.table("steps")
    for row in _rows(steps, ["rank", "start_ns", "wall_ns", "parent_step", *columns], _order(steps, "wall_ns", "step")):
        if row["start_ns"] is None or row["wall_ns"] is None or row["parent_step"] is not None:
            continue
        for name, series in COUNTERS.items():
            values = {label: row[column] for label, column in series.items() if row[column] is not None}
            if values:
                end = clock.us(row["start_ns"] + row["wall_ns"])
                yield {"ph": "C", "name": name, "pid": _process(row), "tid": 0, "ts": end, "args": values}


def _tokens(trace: Trace, clock: _Clock, lanes: dict[tuple[int, int], int]) -> Iterator[Event]:
    tokens = trace.table("tokens")
    order = np.argsort(numbers(tokens, "arrival_ns"), kind="stable")
    columns = ["rank", "call", "step", "sequence", "position", "token_id", "text", "arrival_ns", "logprob"]
    for row in _rows(tokens, columns, order):
        if row["arrival_ns"] is None:
            continue
        args = _known(row, ("step", "sequence", "position", "token_id", "logprob"))
        track = _lane(lanes, row["rank"], row["call"]) * KINDS + TOKENS
        name = row["text"] if row["text"] else f"#{row['token_id']}"
        yield {
            "ph": "i", "s": "t", "name": name, "pid": _process(row), "tid": track,
            "ts": clock.us(row["arrival_ns"]), "args": args,
        }  # fmt: skip


class _Nesting:
    """Keeps the slices of each track inside those that enclose them; they must come in order of their start."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[int]] = {}

    def slice(
        self, clock: _Clock, track: tuple[int, int], name: str, start_ns: int, length_ns: int, args: Event
    ) -> Event:
        """A slice, cut where the one around it ends: clocks of two threads may disagree by a little."""
        ends = self._open.setdefault(track, [])
        while ends and ends[-1] <= start_ns:
            ends.pop()
        end = min([start_ns + length_ns, *ends[-1:]])
        ends.append(end)
        return _slice(clock, track, name, start_ns, end - start_ns, args)


def _slice(clock: _Clock, track: tuple[int, int], name: str, start_ns: int, length_ns: int, args: Event) -> Event:
    return {
        "ph": "X", "name": name, "cat": "lifetrace", "pid": track[0], "tid": track[1], "ts": clock.us(start_ns),
        "dur": length_ns / 1000, "args": args,
    }  # fmt: skip


def _order(table: pa.Table, length: str, number: str) -> Array:
    """Rows by start, the longer first where two begin at once, so that what encloses comes before."""
    return np.lexsort((numbers(table, number), -np.nan_to_num(numbers(table, length)), numbers(table, "start_ns")))


def _rows(table: pa.Table, columns: list[str], order: Array) -> Iterator[Event]:
    """Rows as dictionaries in this order, a batch at a time."""
    chosen = table.select(list(dict.fromkeys(columns)))
    for first in range(0, len(order), BATCH):
        yield from chosen.take(pa.array(order[first : first + BATCH])).to_pylist()


def _process(row: Event) -> int:
    return (row["rank"] or 0) + FIRST_PROCESS


def _lane(lanes: dict[tuple[int, int], int], rank: int | None, call: int | None) -> int:
    return lanes.get((rank or 0, call if call is not None else -1), 0)


def _lane_of_steps(trace: Trace, lanes: dict[tuple[int, int], int]) -> dict[tuple[int | None, int], int]:
    rows = trace.table("steps").select(["rank", "step", "call"]).to_pylist()
    return {(row["rank"], row["step"]): _lane(lanes, row["rank"], row["call"]) for row in rows}


def _name(row: Event) -> str:
    """What a slice is called: its part, else its stage, a layer with its number."""
    name = str(row["part"] or row["stage"] or "?")
    return f"{name} {row['layer']}" if row["layer"] is not None and row["part"] is None else name


def _known(row: Event, names: tuple[str, ...]) -> Event:
    return {name: row[name] for name in names if row[name] is not None}


def _json(value: Any) -> bytes:
    """Strict JSON in UTF-8; half of a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
