"""Finds cold steps: the first of their kind, slowed by what is done once (allocating, tuning, loading code)."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

COLD = 2.0  # times the usual of its kind
KEPT = 64  # steps of a kind that say what is usual
FEWEST = 2


@dataclass
class _Kind:
    first_step: int
    first_ns: int
    others_ns: list[int] = field(default_factory=list)


@dataclass
class ColdWatch:
    """Remembers the first step of each kind, and a few of those after it."""

    kinds: dict[Hashable, _Kind] = field(default_factory=dict)

    def note(self, kind: Hashable, step: int, wall_ns: int) -> None:
        """Note a finished step; those of one kind do the same work."""
        known = self.kinds.setdefault(kind, _Kind(step, wall_ns))
        if step != known.first_step and len(known.others_ns) < KEPT:
            known.others_ns.append(wall_ns)

    def cold(self) -> set[int]:
        """The first steps that took over twice the median of those after them, where there are two or more."""
        return {
            kind.first_step
            for kind in self.kinds.values()
            if len(kind.others_ns) >= FEWEST and kind.first_ns > COLD * median(kind.others_ns)
        }
