"""What a report says first: what limits each phase, where the time beyond the roof went, what to fix."""

from dataclasses import dataclass

from . import units
from .roofline import Explanation, PhaseVerdict
from .verdict_view import lead_rows
from .verdicts import Statement, Verdicts

FURTHER = ("turning points", "with context", "device used")


@dataclass(frozen=True)
class TimePart:
    """A piece of a step's time: a key for its colour, words, ns, and its share of what is shown."""

    key: str
    label: str
    time_ns: float
    share: float


@dataclass(frozen=True)
class PhasePanel:
    """One phase: the claim, the arithmetic behind it, where its time went, and how far to trust it."""

    phase: str
    bound: str
    claim: str
    why: str
    where: str
    parts: list[TimePart]
    confidence: str
    doubts: tuple[str, ...]


def phase_panels(verdicts: Verdicts, where: dict[str, str]) -> list[PhasePanel]:
    """The phases in their order; `where` is a sentence a phase on its stages."""
    phases = {phase.phase: phase for phase in verdicts.phases}
    return [_panel(row, phases[row.phase], where.get(row.phase, "")) for row in verdicts.statements]


def further_rows(verdicts: Verdicts) -> list[tuple[str, str]]:
    """Lost time and what stands behind the verdicts, named as in the terminal."""
    return [(name, text) for name, text in lead_rows(verdicts) if name.startswith("lost time") or name in FURTHER]


def _panel(row: Statement, phase: PhaseVerdict, where: str) -> PhasePanel:
    claim, _, why = row.sentence.partition(": ")
    return PhasePanel(
        phase=row.phase,
        bound=row.bound,
        claim=claim,
        why=why[:1].upper() + why[1:],
        where=where,
        parts=time_parts(phase),
        confidence=row.confidence,
        doubts=row.doubts,
    )


def time_parts(phase: PhaseVerdict) -> list[TimePart]:
    """The mean step's time: roof, what explains the rest, and what nothing explains; empty without a roof.

    Where the parts come to more than was measured, they are shown in proportion, and nothing is left over.
    """
    found = phase.explanation
    if found is None:
        return []
    per_step = phase.calls / phase.steps
    named = [part for part in _named(phase, found) if part[2] > 0]
    whole = sum(ns for _, _, ns in named)
    return [TimePart(key, label, ns * per_step, ns / whole) for key, label, ns in named]


def _named(phase: PhaseVerdict, found: Explanation) -> list[tuple[str, str, float]]:
    roof = "compute" if (phase.verdict.compute_ns or 0) > (phase.verdict.memory_ns or 0) else "memory"
    return [
        (roof, f"roof ({roof})", found.roof_ns),
        ("kernel", "small products below the roof", found.kernel_gap_ns or 0.0),
        ("copy", "cache copying", found.copy_ns or 0.0),
        ("launch", "launching", found.launch_ns or 0.0),
        ("weights", "bringing weights", found.weights_ns or 0.0),
        ("talk", "communication", found.communication_ns or 0.0),
        ("rest", "not explained", found.unexplained_ns),
    ]


def parts_text(parts: list[TimePart]) -> str:
    """The same in words, for those who do not see the bar."""
    return ", ".join(f"{part.label} {units.time(part.time_ns)}" for part in parts)
