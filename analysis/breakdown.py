"""Where the time went: by phase, stage and part, so that the rows add up to the steps' wall time."""

from dataclasses import dataclass
from typing import Any

from .queries import OWN
from .schema import PHASES
from .stage_sums import stage_times
from .trace import Trace


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
    return trace.once("breakdown", lambda: _ordered(stage_times(trace)))


def _ordered(rows: list[dict[str, Any]]) -> list[StageTime]:
    found = []
    for phase in PHASES:
        of_phase = sorted((row for row in rows if row["phase"] == phase), key=lambda row: row["order"])
        for stage in (row for row in of_phase if not row["part"]):
            inside = [row for row in of_phase if row["part"] and row["stage"] == stage["stage"]]
            inside.sort(key=lambda row: row["part"] == OWN)
            found += [_stage_time(row) for row in (stage, *inside)]
    return found


def _stage_time(row: dict[str, Any]) -> StageTime:
    return StageTime(row["phase"], row["stage"], row["part"] or None, row["count"], row["time_ns"], row["share"])
