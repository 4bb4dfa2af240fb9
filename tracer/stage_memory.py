"""Memory of each stage, from a pass of its own, matched to the timed spans by their place in the call."""

from collections.abc import Sequence

import pyarrow as pa

from lifetrace.hooks.attach import Slot
from lifetrace.hooks.recorder import Step

from .steps import pattern_of

RowMemory = tuple[int, int]


class StageMemory:
    """What was allocated at the end of each span, and the peak while it ran, by step of the call."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._by_ordinal: dict[int, list[RowMemory]] = {}
        self._of_step: dict[int, RowMemory] = {}

    def note(self, steps: list[Step]) -> None:
        """Take in the steps of the memory pass."""
        for step in steps:
            marks = step.marks()
            assert marks.memory is not None
            rows = pattern_of(marks.codes, self.slots).rows
            self._by_ordinal[step.ordinal] = [_of_row(marks.memory, row.start, row.end) for row in rows]
            self._of_step[step.ordinal] = _of_row(marks.memory, 0, len(marks.memory) - 1)

    def fill(self, rows: pa.Table, ordinals: dict[int, int]) -> pa.Table:
        """Fill the memory columns of a part of the spans; a step whose rows differ stays null."""
        if not self._by_ordinal:
            return rows
        steps = rows["step"].to_pylist()
        allocated: list[int | None] = [None] * len(steps)
        peak: list[int | None] = [None] * len(steps)
        positions: dict[int, list[int]] = {}
        for position, step in enumerate(steps):
            if step is not None:
                positions.setdefault(step, []).append(position)
        for step, places in positions.items():
            known = self._by_ordinal.get(ordinals.get(step, -1), [])
            if len(known) == len(places):
                for place, memory in zip(places, known, strict=True):
                    allocated[place], peak[place] = memory
        for name, values in (("mem_allocated_bytes", allocated), ("mem_peak_bytes", peak)):
            index = rows.schema.get_field_index(name)
            rows = rows.set_column(index, rows.schema.field(index), pa.array(values, type=pa.int64()))
        return rows

    def fill_steps(self, rows: pa.Table, ordinals: dict[int, int]) -> pa.Table:
        """Fill the memory columns of a part of the steps, where the pass is the only measurement of them."""
        known = [self._of_step.get(ordinals.get(step, -1), (None, None)) for step in rows["step"].to_pylist()]
        for name, values in zip(("mem_allocated_bytes", "mem_peak_bytes"), zip(*known, strict=True), strict=True):
            index = rows.schema.get_field_index(name)
            rows = rows.set_column(index, rows.schema.field(index), pa.array(values, type=pa.int64()))
        return rows


def _of_row(readings: list[tuple[int, int]], start: int, end: int) -> RowMemory:
    """Allocated at the end mark; the highest of the peaks between the marks."""
    return readings[end][0], max((peak for _, peak in readings[start + 1 : end + 1]), default=readings[end][1])
