"""A sweep as one HTML page that asks for nothing from outside."""

from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from .files import replacing
from .report_data import json_block
from .report_words import visible
from .schema import PHASES
from .sweep import PAGE, Sweep
from .sweep_figures import bound_map, front, front_legend, plain, trends
from .sweep_view import FRONT, OVER, axes_words, columns, head_words, reasons, sentences


def write_page(sweep: Sweep, output: Path | None = None) -> Path:
    """Write the page, by default as `sweep.html` into the folder of the sweep.

    Raises:
        TraceError: it cannot be written.
    """
    path = output or sweep.path / PAGE
    with replacing(path, "page") as file:
        file.write(page(sweep).encode("utf-8", "replace"))
    return path


def page(sweep: Sweep) -> str:
    """Render the page."""
    found, frontier = trends(sweep), front(sweep)
    charts = {f"{t.axis.key}-{measure.key}": plain(figure) for t in found for measure, figure in t.charts}
    if frontier is not None:
        charts["front"] = plain(frontier)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((resources.files(__package__) / "sweep.html").read_text(encoding="utf-8"))
    return template.render(
        sweep=sweep,
        head=head_words(sweep),
        axes=axes_words(sweep),
        sentences=[sentence for sentence in sentences(sweep) if not sentence.startswith(FRONT)],
        trends=found,
        over=OVER,
        has_front=frontier is not None,
        front_legend=front_legend(sweep),
        maps=[made for phase in PHASES if (made := bound_map(sweep, phase)) is not None],
        columns=columns(sweep),
        reasons=reasons(sweep),
        visible=visible,
        data=json_block(charts),
        plotly=Markup(get_plotlyjs()),
    )
