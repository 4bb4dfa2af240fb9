"""Verdicts for people: the lines that lead a summary, and the cells beside a stage's time."""

from . import units
from .roofline import UNKNOWN, StageVerdict
from .verdicts import Growth, Loss, Statement, Thresholds, Verdicts, bound_word


def lead_rows(verdicts: Verdicts) -> list[tuple[str, str]]:
    """What to read first, as (name, text): a sentence a phase, the lost time, where the bound turns, growth."""
    rows = [(row.phase, _statement(row)) for row in verdicts.statements]
    rows += [(f"lost time {number}", _loss(loss)) for number, loss in enumerate(verdicts.losses, start=1)]
    turns = _thresholds(verdicts.thresholds)
    if turns:
        rows.append(("turning points", turns))
    if verdicts.growth is not None:
        rows.append(("with context", _growth(verdicts.growth)))
    used = [
        f"{phase.phase} MFU {units.share(phase.mfu)}, MBU {units.share(phase.mbu)}"
        for phase in verdicts.phases
        if phase.mfu is not None or phase.mbu is not None
    ]
    if used:
        rows.append(("device used", "; ".join(used)))
    if verdicts.ceilings_source is not None:
        rows.append(("ceilings", verdicts.ceilings_source))
    return rows


def bound_cell(row: StageVerdict | None) -> str:
    """Bound and efficiency in a few letters, such as `memory 62.7%`; a dash where it is unknown."""
    if row is None or row.verdict.bound == UNKNOWN:
        return units.NONE
    fault = " (!)" if row.verdict.fault else ""
    return f"{bound_word(row.verdict)} {units.percent(row.verdict.efficiency)}{fault}"


def place(row: Loss | StageVerdict) -> str:
    """A row's stage and part in words: `layer, mlp`."""
    return row.stage if row.part is None else f"{row.stage}, {row.part}"


def _statement(row: Statement) -> str:
    doubts = f": {'; '.join(row.doubts)}" if row.doubts else ""
    return f"{row.sentence} Confidence: {row.confidence}{doubts}."


def _loss(row: Loss) -> str:
    return (
        f"{row.phase} {place(row)}: {units.time(row.lost_ns)} of {units.time(row.time_ns)} a call, "
        f"{units.share(row.share_of_phase)} of the phase; {row.reason}"
    )


def _thresholds(found: Thresholds) -> str:
    parts = []
    if found.decode_batch is not None:
        parts.append(f"decode turns compute-bound at a batch of {found.decode_batch:,}")
    if found.prefill_length is not None:
        parts.append(f"prefill turns compute-bound at a prompt of {found.prefill_length:,} tokens")
    if found.kv_context is not None:
        parts.append(f"a step reads more KV than weights from {found.kv_context:,} positions on")
    return "; ".join(parts)


def _growth(found: Growth) -> str:
    if found.slope_us_per_1000 <= 2 * found.error_us_per_1000:
        return f"decode time does not measurably grow over the lengths of these {found.steps} steps"
    text = (
        f"decode takes {units.significant(found.slope_us_per_1000)} µs more for 1,000 positions "
        f"(± {units.significant(found.error_us_per_1000)})"
    )
    if found.kv_read_share is None:
        return text
    copied = f", the cache's own copying {found.kv_copy_share:.0%}" if found.kv_copy_share else ""
    return f"{text}; reading the KV explains {found.kv_read_share:.0%}{copied}"
