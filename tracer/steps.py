"""From marks to rows: what the hooks stored becomes steps, spans and KV rows.

Steps of one model mostly leave the same sequence of marks. Such a sequence is read once into a
*pattern*: which rows it holds, between which two marks each lies, and what encloses it. The
rows of all steps with that pattern then come from one array of times.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from lifetrace.analysis import schema
from lifetrace.hooks.attach import COMMUNICATING, Slot
from lifetrace.hooks.clocks import Marks
from lifetrace.hooks.kvstate import KVLayout
from lifetrace.hooks.recorder import COMMUNICATION, FORWARD, LOGITS, NESTED, STEP, STOP, STREAM, Step
from lifetrace.hooks.stages import Place

FIRST_IN_ATTENTION, LAST_IN_ATTENTION = "qkv", "out_proj"
FIRST_IN_MLP, LAST_IN_MLP = "gate_up", "down"


@dataclass(frozen=True)
class Row:
    """One span of a pattern: between marks `start` and `end`, inside row number `parent`."""

    place: Place
    start: int
    end: int
    parent: int | None
    slot: int | None = None
    call_index: int | None = None


@dataclass(frozen=True, eq=False)
class Pattern:
    """The rows of a sequence of marks, in the order of their starts, and the forward's own marks.

    The same sequence is the same object.
    """

    rows: tuple[Row, ...]
    forward: tuple[int, int] | None


def pattern_of(codes: Sequence[int], slots: Sequence[Slot]) -> Pattern:
    """Read a sequence of marks into rows; a slot that began and did not end (a fault) has no row."""
    last = len(codes) - 1
    calls = _pair(codes)
    forward = next(((start, end) for slot, start, end in calls if slot == FORWARD), None)
    start, end = forward if forward is not None else (last, last)
    inside = [call for call in calls if call[0] > NESTED and start < call[1] and call[2] < end]
    loop = [call for call in calls if call[0] <= COMMUNICATION and call[0] not in (STEP, FORWARD)]
    loop = [call for call in loop if call not in inside]

    rows = _prepare_rows(start, loop)
    rows += _shift(_forward_rows(inside, slots, start, end), len(rows))
    rows += _shift(_after_rows([call for call in loop if call[1] >= end], end, last), len(rows))
    return Pattern(tuple(_in_order(_name_asides(rows))), forward)


def _pair(codes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Match beginnings with ends; returns (slot, start mark, end mark) in the order of the starts."""
    open_marks: dict[int, list[int]] = {}
    pairs = []
    for position, code in enumerate(codes):
        slot, is_end = divmod(code, 2)
        if not is_end:
            open_marks.setdefault(slot, []).append(position)
        elif open_marks.get(slot):
            pairs.append((slot, open_marks[slot].pop(), position))
    return sorted(pairs, key=lambda pair: (pair[1], -pair[2]))


def _shift(rows: list[Row], by: int) -> list[Row]:
    """Move parents by the number of rows that stand before."""
    return [row if row.parent is None else replace(row, parent=row.parent + by) for row in rows]


def _in_order(rows: list[Row]) -> list[Row]:
    """Sort by start, the enclosing row first, and renumber the parents."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i].start, -rows[i].end, i))
    new_number = {old: new for new, old in enumerate(order)}
    return [
        row if row.parent is None else replace(row, parent=new_number[row.parent]) for row in (rows[i] for i in order)
    ]


def _prepare_rows(start: int, loop: list[tuple[int, int, int]]) -> list[Row]:
    """What the loop does before the forward; a streamer that is handed the prompt runs in it."""
    if start == 0:
        return []
    rows = [Row(Place("prepare"), 0, start, None)]
    parts = {
        STREAM: Place("prepare", part="streamer"),
        NESTED: Place("nested"),
        COMMUNICATION: Place("prepare", part=COMMUNICATING),
    }
    rows += [Row(parts[slot], a, b, 0) for slot, a, b in loop if b <= start and slot in parts]
    return rows


def _after_rows(loop: list[tuple[int, int, int]], end: int, last: int) -> list[Row]:
    """What the loop does after the forward: `sample` with its parts, or a gap where nothing was chosen."""
    if end >= last:
        return []
    logits = [b for slot, _, b in loop if slot == LOGITS]
    stops = [a for slot, a, _ in loop if slot == STOP]
    if not logits and not stops:
        return [Row(Place("other"), end, last, None)]
    rows = [Row(Place("sample"), end, last, None)]
    processed, stop = (logits or [end])[-1], (stops or [last])[0]
    if logits:
        rows.append(Row(_sampling("logits"), end, processed, 0))
    rows.append(Row(_sampling("draw"), processed, stop, 0))
    streams = [(a, b) for slot, a, b in loop if slot == STREAM and a >= stop]
    position = stop
    for a, b in streams:
        rows += [Row(_sampling("stop_check"), position, a, 0), Row(_sampling("streamer"), a, b, 0)]
        position = b
    if position < last:
        rows.append(Row(_sampling("stop_check"), position, last, 0))
    for slot, a, b in loop:
        if slot in (NESTED, COMMUNICATION):
            parent = next(i for i in range(len(rows) - 1, -1, -1) if rows[i].start <= a and b <= rows[i].end)
            rows.append(Row(Place("nested") if slot == NESTED else _sampling(COMMUNICATING), a, b, parent))
    return rows


def _sampling(part: str) -> Place:
    return Place("sample", part=part)


def _forward_rows(calls: list[tuple[int, int, int]], slots: Sequence[Slot], start: int, end: int) -> list[Row]:
    """Rows of the modules inside the forward, with the gaps at its top level as `other`."""
    rows: list[Row] = []
    open_rows: list[int] = []
    seen: Counter[int] = Counter()
    layers = 0
    for slot, a, b in calls:
        while open_rows and rows[open_rows[-1]].end <= a:
            open_rows.pop()
        parent = open_rows[-1] if open_rows else None
        place = slots[slot].place
        if place.part in schema.ASIDES and parent is None:  # between the stages: a part of a row there
            rows.append(Row(Place("other"), a, b, None))
            open_rows.append(len(rows) - 1)
            parent = open_rows[-1]
        if place.part in schema.ASIDES and parent is not None:
            place = Place(rows[parent].place.stage, rows[parent].place.layer, place.part)
        elif place.stage == "layer":
            if place.part is None and parent is None:
                # In the order of execution; a layer that was skipped leaves its number, and its cache slot, out.
                place = replace(place, layer=max(layers, place.layer or 0))
                layers = (place.layer or 0) + 1
            elif parent is not None:
                place = replace(place, layer=rows[parent].place.layer)
        rows.append(Row(place, a, b, parent, slot, seen[slot]))
        open_rows.append(len(rows) - 1)
        seen[slot] += 1
    rows = _name_norms(rows)
    rows = _name_parts(rows)
    return rows + _gaps(rows, start, end)


def _name_norms(rows: list[Row]) -> list[Row]:
    """A norm after the last layer is the final norm wherever it was registered; before, it is not."""
    layer_ends = [row.end for row in rows if row.parent is None and row.place.stage == "layer"]
    if not layer_ends:
        return rows
    named = []
    for row in rows:
        stage, part = row.place.stage, row.place.part
        if row.parent is None and stage == "other" and part == "norm" and row.start > layer_ends[-1]:
            row = replace(row, place=Place("final_norm"))
        elif row.parent is None and stage == "final_norm" and row.start < layer_ends[-1]:
            row = replace(row, place=Place("other", part="norm"))
        named.append(row)
    return named


def _name_parts(rows: list[Row]) -> list[Row]:
    """Name what runs inside attention and MLP by its order: the last matrix puts out, the others take in."""
    children: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if row.parent is not None and row.place.part not in schema.ASIDES:
            children.setdefault(row.parent, []).append(number)
    named = list(rows)
    for number, row in enumerate(rows):
        if row.place.part in ("attention", "mlp") and number in children:
            _name_inside(named, number, children)
    return named


def _name_asides(rows: list[Row]) -> list[Row]:
    """Say in what part of its stage it is what comes between: `attention.weights`, say; `weights` outside of any."""
    named = list(rows)
    for number, row in enumerate(rows):
        if row.place.part in schema.ASIDES and row.parent is not None:
            around = row.parent
            while (above := rows[around].parent) is not None and rows[above].parent is not None:
                around = above
            part = rows[around].place.part if rows[around].parent is not None else None
            if part is not None:
                named[number] = replace(row, place=replace(row.place, part=f"{part}.{row.place.part}"))
    return named


def _descendants(number: int, children: dict[int, list[int]]) -> list[int]:
    found = []
    for child in children.get(number, ()):
        found += [child, *_descendants(child, children)]
    return found


def _name_inside(rows: list[Row], number: int, children: dict[int, list[int]]) -> None:
    attention = rows[number].place.part == "attention"
    first, final = (FIRST_IN_ATTENTION, LAST_IN_ATTENTION) if attention else (FIRST_IN_MLP, LAST_IN_MLP)
    inside = _descendants(number, children)
    matrices = [i for i in inside if rows[i].place.matrix and rows[i].place.part is None and i not in children]
    for i in matrices:
        part = final if i == matrices[-1] and len(matrices) > 1 else first
        rows[i] = replace(rows[i], place=replace(rows[i].place, part=part))
    for i in inside:
        if rows[i].place.part is None and not rows[i].place.matrix and i not in children:
            part = "attention_core" if attention else "activation"
            rows[i] = replace(rows[i], place=replace(rows[i].place, part=part))
    if attention and len(matrices) > 1:
        _add_core(rows, number, children[number])


def _add_core(rows: list[Row], number: int, direct: list[int]) -> None:
    """What lies between the last projection and the output projection is the attention core."""
    out = next((i for i in reversed(direct) if rows[i].place.part == LAST_IN_ATTENTION), None)
    if out is None:
        return
    before = [rows[i].end for i in direct if i < out and rows[i].place.part != "attention_core"]
    if not before:
        return
    core = Row(Place("layer", rows[number].place.layer, "attention_core"), max(before), rows[out].start, number)
    for i in direct:
        if core.start <= rows[i].start and rows[i].end <= core.end and i != out:
            rows[i] = replace(rows[i], parent=len(rows))
    rows.append(core)


def _gaps(rows: list[Row], start: int, end: int) -> list[Row]:
    """Time of the forward outside every hooked module: mask building, residuals between stages."""
    gaps = []
    position = start
    for row in sorted((row for row in rows if row.parent is None), key=lambda row: row.start):
        gaps.append(Row(Place("other"), position, row.start, None))
        position = row.end
    gaps.append(Row(Place("other"), position, end, None))
    return [gap for gap in gaps if gap.end > gap.start]


@dataclass(frozen=True)
class Rows:
    """Arrow tables of one batch of steps, the rows of the steps by their number; `spans_used` are span ids taken."""

    of_step: dict[int, dict[str, Any]]
    steps: pa.Table
    spans: pa.Table
    kv: pa.Table
    spans_used: int


class StepReader:
    """Turns steps into rows for one trace.

    Args:
        slots: what each slot stands for.
        run_id: written into every row.
        rank: of this process.
        origin_ns: the monotonic time that counts as 0.
    """

    def __init__(self, slots: Sequence[Slot], run_id: str, rank: int, origin_ns: int) -> None:
        self.slots = slots
        self.run_id = run_id
        self.rank = rank
        self.origin_ns = origin_ns
        self.next_span = 0
        self._pattern = lru_cache(maxsize=256)(lambda codes: pattern_of(np.frombuffer(codes, np.int64).tolist(), slots))
        self._columns_of = lru_cache(maxsize=256)(self._pattern_columns)

    def read(self, steps: Sequence[Step], detailed: Iterable[bool], rss_bytes: int | None) -> Rows:
        """Return the rows of steps that are closed.

        Args:
            steps: in the order in which they ended.
            detailed: for each, whether its spans and its KV are written.
            rss_bytes: of the process, now.
        """
        steps = sorted(steps, key=lambda step: step.index)
        marks = [step.marks() for step in steps]
        patterns = [self._pattern(m.codes.tobytes()) for m in marks]
        step_rows = [
            self._step_row(step, m, pattern, rss_bytes) for step, m, pattern in zip(steps, marks, patterns, strict=True)
        ]
        wanted = dict(zip((step.index for step in steps), detailed, strict=True))
        first_span = self.next_span
        tables = []
        chosen = [triple for triple in zip(steps, marks, patterns, strict=True) if wanted[triple[0].index]]
        for pattern, group in itertools.groupby(chosen, key=lambda triple: triple[2]):
            if pattern.rows:
                of_pattern = list(group)
                tables.append(self._spans(pattern, [s for s, _, _ in of_pattern], [m for _, m, _ in of_pattern]))
        spans = pa.concat_tables(tables) if tables else schema.SPANS.schema.empty_table()
        return Rows(
            of_step={step.index: row for step, row in zip(steps, step_rows, strict=True)},
            steps=table_of(schema.STEPS, step_rows),
            spans=spans.unify_dictionaries(),
            kv=self._kv([step for step in steps if wanted[step.index]]),
            spans_used=self.next_span - first_span,
        )

    def _step_row(self, step: Step, marks: Marks, pattern: Pattern, rss_bytes: int | None) -> dict[str, Any]:
        times, signature = marks.times_ns, step.signature
        first, last = times[0], times[-1]
        start, end = pattern.forward if pattern.forward is not None else (None, None)
        forward_ns = times[end] - times[start] if start is not None and end is not None else None
        prepare_ns = times[start] - first if start is not None else last - first
        allocated, reserved, peak = step.memory
        processed = signature.batch * signature.q_len if signature is not None else None
        return {
            "run_id": self.run_id,
            "rank": self.rank,
            "repeat": step.call.repeat,
            "call": step.call.index,
            "step": step.index,
            "parent_step": step.parent,
            "phase": phase_of(step),
            "role": step.role,
            "batch": signature.batch if signature is not None else None,
            "q_len": signature.q_len if signature is not None else None,
            "kv_len_before": signature.kv_len_before if signature is not None else None,
            "kv_len_after": step.kv_len_after,
            "tokens_processed": processed,
            "discarded": step.failed,
            "warmup": False,
            "start_ns": first - self.origin_ns,
            "wall_ns": last - first,
            "forward_ns": forward_ns,
            "sample_ns": times[-1] - times[end] if end is not None and step.chose else None,
            "prepare_ns": prepare_ns,
            "device_ns": _device_ns(marks, start, end),
            "kv_bytes": step.kv_after.logical_bytes if not step.failed else None,
            "kv_allocated_bytes": step.kv_after.allocated_bytes if not step.failed else None,
            "mem_allocated_bytes": allocated,
            "mem_reserved_bytes": reserved,
            "mem_peak_bytes": peak,
            "rss_bytes": rss_bytes,
        }

    def _spans(self, pattern: Pattern, steps: list[Step], marks: list[Marks]) -> pa.Table:
        """Rows of all steps of one pattern: times of shape [steps, marks] give columns [steps · rows]."""
        count, rows = len(steps), pattern.rows
        times = np.array([m.times_ns for m in marks], dtype=np.int64)
        starts, ends_ = [row.start for row in rows], [row.end for row in rows]
        ids = self.next_span + np.arange(count * len(rows), dtype=np.int64).reshape(count, len(rows))
        self.next_span += count * len(rows)
        parents = np.array([-1 if row.parent is None else row.parent for row in rows])
        parent_ids = ids[:, parents]
        columns: dict[str, pa.Array] = {
            "run_id": _constant(self.run_id, count * len(rows)),
            "rank": pa.array(np.full(count * len(rows), self.rank, dtype=np.int32)),
            "step": pa.array(np.repeat([step.index for step in steps], len(rows))),
            "phase": _words([phase_of(step) for step in steps], each=len(rows)),
            "span": pa.array(ids.ravel()),
            "parent": pa.array(parent_ids.ravel(), mask=np.tile(parents < 0, count)),
            "start_ns": pa.array((times[:, starts] - self.origin_ns).ravel()),
            "host_ns": pa.array((times[:, ends_] - times[:, starts]).ravel()),
            "device_ns": _device_column(rows, marks),
            "starved": _starved_column(rows, marks),
        }
        columns |= _tile(self._columns_of(pattern), len(rows), count)
        return _conform(columns, schema.SPANS, count * len(rows))

    def _pattern_columns(self, pattern: Pattern) -> dict[str, pa.Array]:
        """What is the same in each step of a pattern."""
        rows = pattern.rows
        slots = [self.slots[row.slot] if row.slot is not None else None for row in rows]
        values: dict[str, tuple[list[Any], pa.DataType]] = {
            "stage": ([row.place.stage for row in rows], schema.WORD),
            "layer": ([row.place.layer for row in rows], schema.SMALL),
            "part": ([row.place.part for row in rows], schema.WORD),
            "module": ([slot.module if slot is not None else None for slot in slots], schema.WORD),
            "class_name": ([slot.class_name if slot is not None else None for slot in slots], schema.WORD),
            "call_index": ([row.call_index for row in rows], schema.SMALL),
            "device": ([slot.device if slot is not None else None for slot in slots], schema.WORD),
        }
        return {name: _encoded(given, type_) for name, (given, type_) in values.items()}

    def _kv(self, steps: list[Step]) -> pa.Table:
        """Rows of the caches; steps whose cache only grew since one reading come from one array."""
        groups = itertools.groupby(steps, key=lambda step: step.kv_after.layout)
        tables = [self._kv_of(layout, list(group)) for layout, group in groups if layout.layers]
        return pa.concat_tables(tables).unify_dictionaries() if tables else schema.KV.schema.empty_table()

    def _kv_of(self, layout: KVLayout, steps: list[Step]) -> pa.Table:
        layers, count = layout.layers, len(steps)
        grown = np.array([step.kv_after.grown for step in steps], dtype=np.int64)[:, None]
        sizes = np.array(layout.position_bytes if layout.grows_evenly else [0] * len(layers), dtype=np.int64)
        logical = np.array([kv.logical_bytes for kv in layers], dtype=np.int64) + grown * sizes
        allocated = np.where(grown > 0, logical, np.array([kv.allocated_bytes for kv in layers], dtype=np.int64))
        columns: dict[str, pa.Array] = {
            "run_id": _constant(self.run_id, count * len(layers)),
            "rank": pa.array(np.full(count * len(layers), self.rank, dtype=np.int32)),
            "step": pa.array(np.repeat([step.index for step in steps], len(layers))),
            "layer": pa.array(np.tile(np.arange(len(layers), dtype=np.int32), count)),
            "length": pa.array((np.array([kv.length for kv in layers]) + grown).ravel()),
            "logical_bytes": pa.array(logical.ravel()),
            "allocated_bytes": pa.array(allocated.ravel()),
        }
        words = ("kind", "dtype", "device")
        encoded = {name: _encoded([getattr(kv, name) for kv in layers], schema.WORD) for name in words}
        columns |= _tile(encoded, len(layers), count)
        return _conform(columns, schema.KV, count * len(layers))


def is_top(step: Step) -> bool:
    """Whether a step is of the traced model's own loop, not inside another step."""
    return step.parent is None and step.call.parent_step is None


def phase_of(step: Step) -> str:
    """The phase of a step: prefill until its call has chosen a token."""
    return "prefill" if step.prefill else "decode"


def table_of(table: schema.Table, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Build an Arrow table from rows; a column that no row names is null."""
    columns = {
        column.name: pa.array([row.get(column.name) for row in rows], type=_plain(column.type))
        for column in table.columns
    }
    return _conform(columns, table, len(rows))


def _conform(columns: dict[str, pa.Array], table: schema.Table, length: int) -> pa.Table:
    arrays, nulls = [], cache(partial(pa.nulls, length))
    for column in table.columns:
        array = columns.get(column.name)
        if array is None:
            array = nulls(column.type)
        elif array.type != column.type:
            array = array.dictionary_encode() if pa.types.is_dictionary(column.type) else array.cast(column.type)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=table.schema)


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _constant(value: str, length: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(length, dtype=np.int32)), pa.array([value]))


def _words(values: list[str], each: int) -> pa.Array:
    encoded = pa.array(values).dictionary_encode()
    return pa.DictionaryArray.from_arrays(np.repeat(encoded.indices.to_numpy(), each), encoded.dictionary)


def _encoded(values: list[Any], type_: pa.DataType) -> pa.Array:
    one = pa.array(values, type=_plain(type_))
    return one.dictionary_encode() if pa.types.is_dictionary(type_) else one


def _tile(columns: dict[str, pa.Array], length: int, count: int) -> dict[str, pa.Array]:
    """Repeat columns of one step for all steps of its pattern."""
    index = pa.array(np.tile(np.arange(length), count))
    return {name: column.take(index) for name, column in columns.items()}


def _device_ns(marks: Marks, start: int | None, end: int | None) -> int | None:
    if marks.device_ns is None or start is None or end is None:
        return None
    if marks.devices is None or marks.devices[start] != marks.devices[end]:
        return None
    first, last = marks.device_ns[start], marks.device_ns[end]
    return last - first if first is not None and last is not None else None


def _starved_column(rows: Sequence[Row], marks: Sequence[Marks]) -> pa.Array:
    """Whether the device had run out of work at each row's beginning; null where that is not known."""
    if all(m.starved is None for m in marks):
        return pa.nulls(len(marks) * len(rows), schema.FLAG)
    return pa.array([m.starved[row.start] if m.starved is not None else None for m in marks for row in rows])


def _device_column(rows: Sequence[Row], marks: list[Marks]) -> pa.Array:
    if marks[0].device_ns is None:
        return pa.nulls(len(rows) * len(marks), pa.int64())
    return pa.array([_device_ns(m, row.start, row.end) for m in marks for row in rows], type=pa.int64())
