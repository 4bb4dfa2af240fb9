"""What the work of a step waits for, measured: weights that are brought to it, processes that it talks to."""

from dataclasses import dataclass

from .breakdown import StageTime, breakdown
from .schema import COMMUNICATION, PHASES, RELEASE, WEIGHTS
from .trace import Trace


@dataclass(frozen=True)
class Waits:
    """In ns of one call: offloaded weights brought and let go of, and talking; null where nothing was recorded."""

    weights_ns: float | None = None
    communication_ns: float | None = None

    @property
    def total_ns(self) -> float:
        """What is known of both."""
        return (self.weights_ns or 0.0) + (self.communication_ns or 0.0)

    def scaled(self, factor: float) -> "Waits":
        """The same on another clock, whose times are so many times as long."""
        times = (None if ns is None else ns * factor for ns in (self.weights_ns, self.communication_ns))
        return Waits(*times)


UNKNOWN = Waits()


def of_row(row: StageTime, rows: list[StageTime]) -> Waits:
    """What one row of `breakdown` holds: a stage its parts', what comes between all of it, another part nothing."""
    if row.part is None:
        return _sum([one for one in rows if (one.phase, one.stage) == (row.phase, row.stage)])
    return _sum([row])


def by_phase(trace: Trace) -> dict[str, Waits]:
    """What each phase of a trace holds; a phase that was not recorded in detail is left out."""
    of_phases = {phase: [row for row in breakdown(trace) if row.phase == phase] for phase in PHASES}
    return {phase: _sum(rows) for phase, rows in of_phases.items() if rows}


def _sum(rows: list[StageTime]) -> Waits:
    offloading, talking = (
        sum((row.time_ns for row in rows if row.part in words), 0.0) for words in ((WEIGHTS, RELEASE), (COMMUNICATION,))
    )
    return Waits(offloading, talking)
