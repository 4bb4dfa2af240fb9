"""What a notebook shows of a trace: the verdict, the headline facts, and where the time went."""

from html import escape

from . import units
from .schema import PHASES
from .summary import Summary, summarize
from .terminal import printable, summary_rows
from .trace import Trace
from .verdict_view import bound_cell, lead_rows

# notebooks are light or dark: no colour of text or paper is set
LEFT = "text-align:left;vertical-align:top"
RIGHT = "text-align:right;white-space:nowrap"
BAR = "display:inline-block;height:0.7em;background:#0072B2"
BAR_EM = 12.0


def notebook_html(trace: Trace) -> str:
    """A trace as two HTML tables; whatever it holds as text is escaped."""
    summary = summarize(trace)
    facts = [*lead_rows(summary.verdicts), *summary_rows(summary)]
    rows = "".join(
        f"<tr><th style='{LEFT};white-space:nowrap'>{_safe(name)}</th><td style='{LEFT}'>{_safe(text)}</td></tr>"
        for name, text in facts
    )
    return f"<table>{rows}</table>{_stages(summary)}"


def _stages(summary: Summary) -> str:
    """A table of the stages and parts of both phases; nothing where no spans were recorded."""
    rows = []
    for phase in PHASES:
        for row in [row for row in summary.stages if row.phase == phase]:
            name = row.stage if row.part is None else f"{row.stage}, {row.part}"
            bound = bound_cell(summary.verdicts.stage(row.phase, row.stage, row.part))
            cells = [
                (LEFT, phase), (LEFT, _safe(name)), (RIGHT, units.time(row.time_ns)), (RIGHT, units.share(row.share)),
                (LEFT, f"<span style='{BAR};width:{row.share * BAR_EM:.2f}em'></span>"), (LEFT, _safe(bound)),
            ]  # fmt: skip
            rows.append("<tr>" + "".join(f"<td style='{style}'>{text}</td>" for style, text in cells) + "</tr>")
    if not rows:
        return ""
    names = ("phase", "stage", "time of a call", "share", "", "bound")
    head = "".join(f"<th style='{LEFT}'>{name}</th>" for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _safe(text: str) -> str:
    return escape(printable(text))
