"""The figures by name, and writing one as a picture."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go

from lifetrace.errors import TraceError

from . import figures
from .files import replacing
from .roofline_figure import roofline
from .trace import Trace

FIGURES: dict[str, Callable[[Trace], go.Figure]] = {
    "timeline": figures.timeline,
    "breakdown": figures.stage_times,
    "roofline": roofline,
    "heatmap": figures.heat_map,
    "efficiency": figures.heat_map_efficiency,
    "kv-growth": figures.kv_growth,
    "memory": figures.memory,
    "token-latency": figures.token_latency,
}
PICTURES = ("png", "svg")
WIDTH = 1000


def write_picture(trace: Trace, name: str, path: Path, kind: str) -> Path:
    """Draw a figure and write it as PNG or SVG.

    Args:
        trace: what to draw.
        name: a key of `FIGURES`.
        path: the file to write.
        kind: `png` or `svg`.

    Raises:
        TraceError: the optional package that draws pictures is missing or fails, or the file cannot be written.
    """
    if importlib.util.find_spec("kaleido") is None:
        raise TraceError(
            "Pictures are drawn by the package kaleido, which is not installed: `pip install kaleido`, "
            "or write the report, whose figures need nothing."
        )
    figure = FIGURES[name](trace)
    figure.update_layout(title=name.replace("-", " "), paper_bgcolor="white", plot_bgcolor="white")
    figure.update_layout(margin={"t": 70})
    try:
        picture = figure.to_image(
            format=kind, width=WIDTH, height=figure.layout.height, scale=2 if kind == "png" else 1
        )
    except (ValueError, RuntimeError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise TraceError(f"kaleido could not draw the figure {name}: {cause} It needs Chrome or Chromium.") from None
    with replacing(path, "picture") as file:
        file.write(picture)
    return path
