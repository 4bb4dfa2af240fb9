"""The processes of one job beside each other: what each took, what of it talking to the others, and who was late."""

from dataclasses import dataclass

from .breakdown import breakdown
from .schema import COMMUNICATION, PHASES
from .trace import Trace

UNEVEN = 0.1  # of a phase's time: by so much the shares of talking differ where one keeps the others waiting


@dataclass(frozen=True)
class RankTime:
    """One process in one phase, times of one call: its steps as a whole, and what of them it talked or waited."""

    rank: int
    phase: str
    status: str
    time_ns: float
    communication_ns: float
    share: float


def rank_times(trace: Trace) -> list[RankTime]:
    """Every process of a trace, by phase; none where there is one alone.

    A collective ends when the last process has come to it: who comes last waits least.
    """
    if len(trace.ranks) < 2:
        return []
    return [found for phase in PHASES for one in trace.ranks if (found := _rank_time(one, phase)) is not None]


def _rank_time(trace: Trace, phase: str) -> RankTime | None:
    rows = [row for row in breakdown(trace) if row.phase == phase]
    if not rows:
        return None
    whole = sum(row.time_ns for row in rows if row.part is None)
    talked = sum(row.time_ns for row in rows if row.part == COMMUNICATION)
    share = talked / whole if whole else 0.0
    return RankTime(trace.rank, phase, str(trace.meta.get("status")), whole, talked, share)


def rank_words(times: list[RankTime]) -> list[str]:
    """A sentence for each phase in which they talk: who keeps the others waiting, or that nobody does."""
    said = []
    for phase in PHASES:
        mine = sorted((row for row in times if row.phase == phase), key=lambda row: row.share)
        if len(mine) < 2 or not any(row.communication_ns for row in mine):
            continue  # processes that say nothing to each other do not wait for each other
        least, most = mine[0], mine[-1]
        if most.share - least.share >= UNEVEN:
            said.append(
                f"In {phase} rank {least.rank} keeps the others waiting: {least.share:.0%} of its time is "
                f"communication, of rank {most.rank}'s {most.share:.0%}."
            )
        else:
            said.append(
                f"In {phase} the {len(mine)} ranks are level: {least.share:.0%} to {most.share:.0%} of their time "
                "is communication."
            )
    return said
