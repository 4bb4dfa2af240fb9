"""Where the time went: by phase, stage and part, so that the rows add up to the steps' wall time."""

from dataclasses import dataclass
from typing import Any

import narwhals as nw

from .schema import PHASES
from .trace import Trace

OWN = "own"


@dataclass(frozen=True)
class StageTime:
    """Time of one stage in one phase, as the mean over the traced calls, and its share of the phase.

    `part` is null on a stage's own row; below it are its parts, whose times add up to the
    stage's where `own` (residual additions and the like) is counted with them.
    """

    phase: str
    stage: str
    part: str | None
    count: int
    time_ns: float
    share: float


def breakdown(trace: Trace) -> list[StageTime]:
    """Return the rows of both phases, stages in the order in which they run, parts below theirs.

    Only top-level steps count (a forward inside another step is that step's `nested` row). Times
    are per call: where spans were recorded of some steps alone, those stand for the others.
    """
    spans = nw.from_native(
        trace.table("spans").select(["step", "phase", "span", "parent", "stage", "part", "start_ns", "host_ns"])
    )
    steps = nw.from_native(trace.table("steps").select(["step", "call", "phase", "parent_step", "warmup", "discarded"]))
    counted = steps.filter(nw.col("parent_step").is_null(), ~nw.col("warmup"), ~nw.col("discarded"))
    per_call = steps_per_call(trace)
    mine = spans.join(counted.select("step"), on="step", how="inner")
    stages = _sum(mine.filter(nw.col("parent").is_null()), ["phase", "stage"])
    parts = _sum(_with_parent_stage(mine), ["phase", "stage", "part"])
    rows = []
    for phase in PHASES:
        of_phase = [row for row in stages if row["phase"] == phase]
        total = sum(row["host_ns"] for row in of_phase)
        recorded = mine.filter(nw.col("phase") == phase)["step"].n_unique()
        scale = per_call.get(phase, 0.0) / recorded if recorded else 0.0
        for row in sorted(of_phase, key=lambda row: row["order"]):
            rows.append(_stage_time(row, None, scale, total))
            inside = [part for part in parts if (part["phase"], part["stage"]) == (phase, row["stage"])]
            rows += [_stage_time(part, part["part"], scale, total) for part in sorted(inside, key=lambda p: p["order"])]
            own = row["host_ns"] - sum(part["host_ns"] for part in inside)
            if inside and row["stage"] == "layer":
                rows.append(_stage_time(row | {"host_ns": own}, OWN, scale, total))
    return rows


def steps_per_call(trace: Trace) -> dict[str, float]:
    """Top-level steps of each phase in a call that has that phase, on average; cold ones are steps too."""
    columns = trace.table("steps").select(["call", "phase", "parent_step", "discarded"]).to_pylist()
    kept = [row for row in columns if row["parent_step"] is None and not row["discarded"]]
    found = {}
    for phase in PHASES:
        calls = [row["call"] for row in kept if row["phase"] == phase]
        if calls:
            found[phase] = len(calls) / len(set(calls))
    return found


def _with_parent_stage(spans: nw.DataFrame) -> nw.DataFrame:  # type: ignore[type-arg]
    """Direct children of top-level spans that bear a part."""
    top = spans.filter(nw.col("parent").is_null()).select(nw.col("span").alias("parent"))
    return spans.filter(~nw.col("part").is_null()).join(top, on="parent", how="inner")


def _sum(spans: nw.DataFrame, by: list[str]) -> list[dict[str, Any]]:  # type: ignore[type-arg]
    """Total time and count of each group; `order` tells which began first within its step."""
    first = spans.group_by("step").agg(nw.col("start_ns").min().alias("step_start"))
    placed = spans.join(first, on="step", how="inner").with_columns(
        (nw.col("start_ns") - nw.col("step_start")).alias("offset")
    )
    grouped = placed.group_by(by).agg(
        nw.col("host_ns").sum(), nw.len().alias("count"), nw.col("offset").mean().alias("order")
    )
    return list(grouped.iter_rows(named=True))


def _stage_time(row: dict[str, Any], part: str | None, scale: float, total: float) -> StageTime:
    time_ns = float(row["host_ns"])
    return StageTime(
        phase=str(row["phase"]),
        stage=str(row["stage"]),
        part=part,
        count=int(row["count"]),
        time_ns=time_ns * scale,
        share=time_ns / total if total else 0.0,
    )
