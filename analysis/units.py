"""Numbers for people: times, bytes and rates with a unit, three significant digits, null as a dash."""

NONE = "–"


def significant(value: float, digits: int = 3) -> str:
    """Format with so many significant digits, without an exponent, thousands separated."""
    if value == 0:
        return "0"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(digits - magnitude, 0)}f}"


def time(ns: float | None) -> str:
    """Nanoseconds in the unit that fits: ns, µs, ms or s."""
    if ns is None:
        return NONE
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(ns) >= scale:
            return f"{significant(ns / scale)} {unit}"
    return f"{significant(ns)} ns"


def byte_count(count: float | None) -> str:
    """Bytes in decimal units, as GB = 10⁹ B is written throughout."""
    if count is None:
        return NONE
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{int(count)} B"


def flop_count(count: float | None) -> str:
    """Floating-point operations in decimal units: kFLOP to PFLOP."""
    if count is None:
        return NONE
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if abs(count) >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{significant(count)} FLOP"


def rate(per_second: float | None, unit: str) -> str:
    """A rate with its unit, such as tokens/s."""
    return NONE if per_second is None else f"{significant(per_second)} {unit}"


def share(fraction: float | None) -> str:
    """A fraction as a percentage with one decimal."""
    return NONE if fraction is None else f"{fraction:.1%}"


def percent(fraction: float | None) -> str:
    """A fraction in whole percents, one that is not nothing never as 0."""
    if fraction is None:
        return NONE
    return "<1%" if 0 < fraction < 0.01 else f"{fraction:.0%}"


def count(value: int | None) -> str:
    """A whole number with thousands separated."""
    return NONE if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """A span of time that a person waits: s, min or h, rounded to what an estimate is worth."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
