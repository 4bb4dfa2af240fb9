"""Operators of the profiled steps, summed by where they ran: what `--ops` recorded, as an answer."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .trace import Trace


@dataclass(frozen=True)
class OperatorTime:
    """One operator in one place of a phase, summed over the layers and averaged over its profiled steps.

    `time_ns` is of its kernels where the device has a clock, else its own time on the host;
    `share` is of all operators of the phase. Under the profiler all of it is slower than in the spans.
    """

    phase: str
    stage: str | None
    part: str | None
    op: str
    count: float
    time_ns: float
    share: float


def operators(trace: Trace) -> list[OperatorTime]:
    """Return the operators of both phases, slowest first; none where the run did without `--ops`."""
    table = trace.table("ops")
    if not len(table):
        return []
    on_device = pc.any(pc.is_valid(table["device_ns"])).as_py()
    time = pc.fill_null(table["device_ns"], 0) if on_device else pc.fill_null(table["host_ns"], 0)
    words = {name: table[name].cast(pa.string()) for name in ("phase", "stage", "part", "op")}
    plain = pa.table(words | {"step": table["step"], "count": table["count"], "time": time})
    steps = {row["phase"]: row["step_count_distinct"] for row in _by(plain, ["phase"], [("step", "count_distinct")])}
    totals = {row["phase"]: row["time_sum"] for row in _by(plain, ["phase"], [("time", "sum")])}
    rows = [
        OperatorTime(
            phase=row["phase"],
            stage=row["stage"],
            part=row["part"],
            op=row["op"],
            count=row["count_sum"] / steps[row["phase"]],
            time_ns=row["time_sum"] / steps[row["phase"]],
            share=row["time_sum"] / totals[row["phase"]] if totals[row["phase"]] else 0.0,
        )
        for row in _by(plain, ["phase", "stage", "part", "op"], [("count", "sum"), ("time", "sum")])
    ]
    return sorted(rows, key=lambda row: (row.phase != "prefill", -row.time_ns))


def _by(table: pa.Table, keys: list[str], sums: list[tuple[str, str]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.group_by(keys).aggregate(sums).to_pylist()
    return rows
