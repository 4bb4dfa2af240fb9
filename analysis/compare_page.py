"""A comparison as one HTML page that asks for nothing from outside."""

from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, select_autoescape

from .compare import Comparison, Row
from .compare_view import cause_words, change_words, judgement, row_cells, shown_stages
from .report_words import shown


def page(found: Sequence[Comparison]) -> str:
    """Render comparisons with the same first side below each other."""
    environment = Environment(
        autoescape=select_autoescape(default_for_string=True), trim_blocks=True, lstrip_blocks=True, finalize=shown
    )
    template = environment.from_string(
        resources.files(__package__).joinpath("compare.html").read_text(encoding="utf-8")
    )
    return template.render(
        comparisons=found,
        cells=row_cells,
        judgement=judgement,
        stages=shown_stages,
        change_words=change_words,
        cause_words=cause_words,
        bar=_bar,
    )


def _bar(row: Row, comparison: Comparison) -> dict[str, float] | None:
    """Where the bar of a stage's difference begins and how wide it and its bounds are, in percent of the cell."""
    of_phase = [other.difference for other in comparison.stages if other.phase == row.phase]
    ends = [abs(value) for d in of_phase for value in (d.low, d.high, d.delta) if value is not None]
    scale = max(ends, default=0.0)
    found = row.difference
    if not scale or row.stage is None:
        return None
    low = found.low if found.low is not None else found.delta
    high = found.high if found.high is not None else found.delta
    return {
        "left": 50 + 50 * min(0.0, found.delta) / scale,
        "width": 50 * abs(found.delta) / scale,
        "low": 50 + 50 * low / scale,
        "reach": 50 * (high - low) / scale,
    }
