"""What the figures share: the house look, units that suit an axis, the figure that says why it is empty."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from . import units
from .blocks import Array

INK, FAINT = "#24292f", "rgba(120,130,145,0.25)"
MAX_POINTS = 2_000  # along an axis: no screen has more, and a page of a long run stays small
MARGIN = {"l": 56, "r": 12, "t": 34, "b": 44}
# d3's own notation: three significant digits, thousands separated, never an exponent
DIGITS = ",.3~r"
PLAIN_TICKS = {"exponentformat": "none", "separatethousands": True}


@dataclass(frozen=True)
class Bins:
    """`size` neighbours of `count` as one point, the last of what is left; of few each is a point."""

    count: int
    size: int

    @classmethod
    def of(cls, count: int) -> "Bins":
        """So many that there are `MAX_POINTS` at most."""
        return cls(count, max(1, -(-count // MAX_POINTS)))

    @property
    def first(self) -> Array:
        """Where each point begins."""
        return np.arange(0, self.count, self.size)

    @property
    def last(self) -> Array:
        """Where each point ends, itself included."""
        return np.minimum(self.first + self.size, self.count) - 1

    def mean(self, values: Array) -> Array:
        """The mean of each point along the last axis, of what is known; NaN where nothing is."""
        if self.size == 1:
            return values
        known = ~np.isnan(values)
        total = np.add.reduceat(np.where(known, values, 0), self.first, axis=-1)
        with np.errstate(invalid="ignore"):
            return total / np.add.reduceat(known.astype(np.int64), self.first, axis=-1)

    def title(self, what: str, how: str) -> str:
        """The name of the axis, which says where a point is not one of `what`."""
        return what if self.size == 1 else f"{what} ({how.format(f'{self.size:,}')})"

    def hover(self, what: str) -> str:
        """What a point is called when it is pointed at."""
        return f"{what} %{{x}}" if self.size == 1 else f"{self.size:,} {what}s from %{{x}} on"


def time_unit(typical_ns: float) -> tuple[float, str]:
    """Return the nanoseconds in the unit that suits a typical value, and the unit's name."""
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if typical_ns >= scale:
            return scale, unit
    return 1.0, "ns"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the bytes in the decimal unit that suits the largest value, and the unit's name."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= scale:
            return scale, unit
    return 1.0, "B"


def color_range(values: Array) -> tuple[float, float]:
    """The smallest value, and where a scale should end so that outliers do not flatten the rest."""
    low, most, high = float(values.min()), float(np.percentile(values, 98)), float(values.max())
    return low, most * 1.1 if high > 2 * most else high


def cut_axis(figure: go.Figure, values_ns: Array, scale: float) -> None:
    """End the y axis above most values where a few tall ones would flatten the rest, and say so."""
    if len(values_ns) < 4:
        return
    _, top = color_range(values_ns)
    highest = float(values_ns.max())
    if highest > top:
        figure.update_yaxes(range=[0, top / scale * 1.15], autorange=False)
        figure.add_annotation(
            text=f"tallest {units.time(highest)}, cut off", xref="paper", yref="paper", x=1, y=1,
            xanchor="right", yanchor="bottom", showarrow=False, font={"size": 11},
        )  # fmt: skip


def style(figure: go.Figure, x_title: str, y_title: str) -> None:
    """The house look: no frame, faint lines across, one small legend above."""
    figure.update_layout(
        template=None,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        margin=MARGIN,
        height=300,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        hoverlabel={"align": "left"},
    )
    axis = {"zeroline": False, "showline": False, "ticks": "", "title": {"standoff": 8}, "automargin": True}
    axis |= PLAIN_TICKS
    figure.update_xaxes(title_text=x_title, showgrid=False, **axis)
    figure.update_yaxes(title_text=y_title, gridcolor=FAINT, rangemode="tozero", **axis)


def empty(why: str) -> go.Figure:
    """A figure without data that says why."""
    figure = go.Figure()
    style(figure, "", "")
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=why, xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False)
    return figure
