"""The queries on one trace, which read its spans file by file: they are never in memory all at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import pyarrow as pa
import pyarrow.compute as pc

from . import queries
from .trace import Trace

SPAN_COLUMNS = (*queries.SPAN_COLUMNS, *queries.SPAN_WORK)


def ranks_apart(trace: Trace) -> tuple[str, ...]:
    """The columns that tell the rows of this trace apart: the rank, where there are several."""
    return ("rank",) if pc.count_distinct(trace.table("steps")["rank"]).as_py() > 1 else ()


@dataclass(frozen=True)
class Scanned:
    """What is kept of the spans: rows of `queries.step_stages`, the spans of no step, and the numbers of all steps."""

    stages: pa.Table
    loose: pa.Table
    steps: pa.Table
    is_split: bool = False
    """Whether a step lies in several files, which no writer does: then a span may not be in the file of its parent."""


def step_stages(trace: Trace) -> pa.Table:
    """Rows of `queries.step_stages`, with `rank` where there are several."""
    return _scanned(trace).stages


def loose_spans(trace: Trace) -> pa.Table:
    """The spans of no step, which are few: `stage`, `start_ns`, `host_ns`."""
    return _scanned(trace).loose


def _is_split(trace: Trace) -> bool:
    return _scanned(trace).is_split


def _scanned(trace: Trace) -> Scanned:
    return trace.once("scanned", lambda: _scan(trace))


def _scan(trace: Trace) -> Scanned:
    by = ranks_apart(trace)
    columns = (*by, *SPAN_COLUMNS)

    def look(spans: pa.Table) -> Scanned:
        sums = queries.part_of_step_stages(spans, by, queries.SPAN_WORK).collect("pyarrow").to_native()
        loose = spans.select(["stage", "start_ns", "host_ns"]).filter(pc.is_null(spans["step"]))
        loose = loose.set_column(0, "stage", loose["stage"].cast(pa.string()))
        keys = [*by, "step"]
        return Scanned(sums, loose, spans.select(keys).group_by(keys, use_threads=False).aggregate([]))

    parts = trace.scan("spans", columns, look)
    if not parts or _share_steps([part.steps for part in parts]):
        return replace(look(trace.table("spans", columns)), is_split=True)
    tables = ([getattr(part, name) for part in parts] for name in ("stages", "loose", "steps"))
    return Scanned(*map(pa.concat_tables, tables))


def _share_steps(parts: list[pa.Table]) -> bool:
    """Whether a step is in several files; those of spans that no step holds are."""
    steps = pa.concat_tables(parts)
    steps = steps.filter(pc.is_valid(steps["step"]))
    return len(steps.group_by(steps.column_names, use_threads=False).aggregate([])) < len(steps)


def places_of(trace: Trace, steps: pa.Table) -> list[dict[str, Any]]:
    """Rows of `queries.places` over some steps of the first rank."""
    by = ranks_apart(trace)
    if by:
        lowest = pc.min(trace.table("steps", ["rank"])["rank"])
        steps = steps.append_column("rank", pa.repeat(lowest, len(steps)))
    columns = (*by, "step", "span", "parent", "stage", "layer", "part", "host_ns")

    def sums(spans: pa.Table) -> pa.Table:
        return queries.places(spans, steps, by).collect("pyarrow").to_native()

    parts = trace.scan("spans", columns, sums)
    if not parts or _is_split(trace):
        return sums(trace.table("spans", columns)).to_pylist()
    keys = ["phase", "stage", "layer", "part"]
    whole = pa.concat_tables(parts).group_by(keys, use_threads=False).aggregate([("host_ns", "sum")])
    return whole.rename_columns([*keys, "host_ns"]).to_pylist()


def is_starvation_known(trace: Trace) -> bool:
    """Whether the device was asked if it had run out of work: a column that costs little to read where it was not."""
    if trace.has_found("scanned"):
        return bool(pc.any(pc.greater(step_stages(trace)["starved_known"], 0)).as_py())
    return any(trace.scan("spans", ["starved"], lambda spans: spans["starved"].null_count < len(spans)))


def recorded_steps(trace: Trace) -> int:
    """How many steps have spans."""
    return pc.count_distinct(step_stages(trace)["step"]).as_py()


def stage_sums(trace: Trace) -> pa.Table:
    """Rows of `queries.stage_sums`; of several ranks the sums."""
    return trace.once("stage_sums", lambda: _stage_sums(trace))


def _stage_sums(trace: Trace) -> pa.Table:
    by = ranks_apart(trace)
    rows = queries.stage_sums(step_stages(trace), trace.table("steps"), by, queries.SPAN_WORK)
    return _over_ranks(rows, by, ["phase", "stage", "part"], nw.Expr.sum)


def stage_times(trace: Trace) -> list[dict[str, Any]]:
    """Rows of `queries.stage_times`; of several ranks the mean."""
    by, steps = ranks_apart(trace), trace.table("steps")
    recorded = _over_ranks(queries.recorded_steps(step_stages(trace), steps, by), by, ["phase"], nw.Expr.sum)
    found = queries.stage_times(stage_sums(trace), recorded, _steps_per_call(trace), ())
    return found.collect("pyarrow").to_native().to_pylist()


def steps_per_call(trace: Trace) -> dict[str, float]:
    """Top-level steps of each phase in a call that has that phase, on average; cold ones are steps too."""
    return {row["phase"]: row["steps_per_call"] for row in _steps_per_call(trace).to_pylist()}


def _steps_per_call(trace: Trace) -> pa.Table:
    by = ranks_apart(trace)
    return _over_ranks(queries.steps_per_call(trace.table("steps"), by), by, ["phase"], nw.Expr.mean)


def phase_totals(trace: Trace) -> dict[str, dict[str, Any]]:
    """Rows of `queries.phase_totals` by phase; of several ranks the sums."""
    return trace.once("phase_totals", lambda: _phase_totals(trace))


def _phase_totals(trace: Trace) -> dict[str, dict[str, Any]]:
    by = ranks_apart(trace)
    rows = _over_ranks(queries.phase_totals(trace.table("steps"), by), by, ["phase"], nw.Expr.sum)
    return {row["phase"]: row for row in rows.to_pylist()}


def _over_ranks(
    rows: queries.Frame, by: tuple[str, ...], keys: list[str], combine: Callable[[nw.Expr], nw.Expr]
) -> pa.Table:
    """The rows in memory, those of several ranks as one."""
    if by:
        names = [name for name in rows.collect_schema().names() if name not in (*by, *keys)]
        rows = rows.group_by(keys).agg(*(combine(nw.col(name)) for name in names))
    return rows.collect("pyarrow").to_native()
