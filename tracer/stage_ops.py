"""Operators and kernels of a few profiled steps, attributed to stage, layer and part."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lifetrace.hooks.attach import Slot
from lifetrace.hooks.kernels import Operator, StepProfile
from lifetrace.hooks.recorder import Step

from .steps import Pattern, Row, is_top, pattern_of, phase_of

DECODE_STEPS = 3
IDLE = "device idle"


def chosen_steps(steps_in_call: int) -> frozenset[int]:
    """The prefill and a few decode steps spread evenly, as positions in their call; the first decode step among them.

    The last one is left out where there are others: nothing follows it.
    """
    decode = range(1, max(steps_in_call - 1, 2))
    spread = {decode[round(i * (len(decode) - 1) / (DECODE_STEPS - 1))] for i in range(DECODE_STEPS)}
    return frozenset({0} | {step for step in spread if step < steps_in_call})


@dataclass
class _Sum:
    count: int = 0
    host_ns: int = 0
    device_ns: int | None = None


@dataclass
class StageOps:
    """The rows of the ops table, by the step's position in its call."""

    slots: Sequence[Slot]
    _by_ordinal: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def note(self, steps: list[Step]) -> None:
        """Take in the steps of the profiled pass."""
        for step in steps:
            marks = step.marks()
            if marks.profile is not None and is_top(step):
                rows = self._rows(pattern_of(marks.codes, self.slots), marks.profile)
                self._by_ordinal[step.ordinal] = [{"phase": phase_of(step), **row} for row in rows]

    def rows(self, step_at: dict[int, int], run_id: str, rank: int) -> list[dict[str, Any]]:
        """Rows under the steps of the trace, which `step_at` gives for a position in the call."""
        return [
            {"run_id": run_id, "rank": rank, "step": step_at[ordinal], **row}
            for ordinal, rows in sorted(self._by_ordinal.items())
            if ordinal in step_at
            for row in rows
        ]

    def _rows(self, pattern: Pattern, found: StepProfile) -> list[dict[str, Any]]:
        sums: dict[tuple[Any, ...], _Sum] = {}
        for operator in found.operators:
            row = _innermost(pattern, operator.mark)
            key = (*self._place(row, operator), operator.name, operator.shapes, " + ".join(operator.kernels) or None)
            entry = sums.setdefault(key, _Sum())
            entry.count += 1
            entry.host_ns += operator.host_ns
            if operator.device_ns is not None:
                entry.device_ns = (entry.device_ns or 0) + operator.device_ns
        names = ("stage", "layer", "part", "module", "op", "input_shapes", "kernel")
        rows = [dict(zip(names, key, strict=True)) | vars(entry) for key, entry in sums.items()]
        if found.idle_ns is not None:
            rows.append({"op": IDLE, "count": 1, "device_ns": found.idle_ns})
        return rows

    def _place(self, row: Row | None, operator: Operator) -> tuple[Any, ...]:
        if row is None:
            return None, None, None, None
        part = operator.label or ("softmax" if "softmax" in operator.name else row.place.part)
        module = self.slots[row.slot].module if row.slot is not None else None
        return row.place.stage, row.place.layer, part, module


def _innermost(pattern: Pattern, mark: int) -> Row | None:
    """The row that is open after a mark, the innermost of them."""
    inside = [row for row in pattern.rows if row.start <= mark < row.end]
    return min(inside, key=lambda row: row.end - row.start, default=None)
