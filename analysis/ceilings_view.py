"""Ceilings for people: a table for the terminal and a picture of bandwidth and matrix products over size."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import units
from .ceilings import BandwidthPoint, Ceilings, Figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7a6fac", "#4d7f71")


def ceiling_rows(ceilings: Ceilings) -> list[tuple[str, str, str]]:
    """The figures as (name, value, quartiles) in the order in which they are read."""
    rows = []
    for dtype in ceilings.matmul:
        best = ceilings.best_matmul(dtype)
        if best is not None:
            shape = f" at {' × '.join(str(side) for side in best.shape)}" if best.shape else ""
            rows.append((f"{dtype} product{shape}", *_rate(best.flops_per_s, "FLOP/s")))
    for name, points in (("reading", ceilings.read), ("copying", ceilings.copy)):
        rows += [(f"{name} {_size(p.working_set_bytes)}", *_rate(p.bytes_per_s, "B/s")) for p in _some(points)]
    for dtype, points in ceilings.matvec.items():
        name = f"{dtype} matrix–vector"
        rows += [(f"{name}, {_size(p.working_set_bytes)}", *_rate(p.bytes_per_s, "B/s")) for p in points[-1:]]
    if ceilings.launch_ns is not None:
        figure = ceilings.launch_ns
        rows.append(
            ("launching an operator", units.time(figure.median), f"{units.time(figure.low)}–{units.time(figure.high)}")
        )
    if ceilings.host_to_device_bytes_per_s is not None:
        rows.append(("host to device", *_rate(ceilings.host_to_device_bytes_per_s, "B/s")))
    return rows


def quiet_words(ceilings: Ceilings) -> str | None:
    """Whether the machine was quiet, in a sentence; null where it was not asked."""
    found = ceilings.quietness
    if found is None:
        return None
    others = f", other programs kept {found.others_cpu:.2f} cores busy" if found.others_cpu is not None else ""
    facts = f"equal work differed by {found.spread:.0%}{others}"
    if found.quiet:
        return f"The machine was quiet: {facts}."
    return f"The machine was NOT quiet: {facts}. Stop other work and calibrate again before you trust these figures."


def ceilings_table(ceilings: Ceilings) -> Table:
    """The figures with their quartiles."""
    key = ceilings.device
    threads = f", {key.threads} thread{'s' if key.threads != 1 else ''}" if key.type == "cpu" else ""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column(f"{key.name}{threads}")
    table.add_column("median", justify="right")
    table.add_column("quartiles", justify="right", style="dim")
    for name, value, quartiles in ceiling_rows(ceilings):
        table.add_row(Text(name), value, quartiles)
    return table


def print_ceilings(ceilings: Ceilings, notes: list[str], console: Console) -> None:
    """Print the figures, whether the machine was quiet, and what else there is to know."""
    console.print(ceilings_table(ceilings))
    words, quietness = quiet_words(ceilings), ceilings.quietness
    if words is not None and quietness is not None:
        console.print(Text(words, style="" if quietness.quiet else "bold yellow"))
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"))


def ceilings_figure(ceilings: Ceilings) -> "go.Figure":
    """Bandwidth over working set on the left, matrix products over size on the right, quartiles as bars."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("bytes a second over working set", "FLOP/s of square products and of few rows")
    )
    lines = [("read", ceilings.read), ("copy", ceilings.copy)]
    lines += [(f"matrix–vector {dtype}", points) for dtype, points in ceilings.matvec.items()]
    for number, (name, points) in enumerate(lines):
        xs = [point.working_set_bytes for point in points]
        _add_line(figure, 1, name, _COLORS[number % len(_COLORS)], xs, [point.bytes_per_s for point in points])
    for number, (dtype, products) in enumerate(ceilings.matmul.items()):
        square = [(p.shape[0], p.flops_per_s) for p in products if p.shape and len(set(p.shape)) == 1]
        color = _COLORS[number % len(_COLORS)]
        _add_line(figure, 2, f"{dtype} n × n × n", color, [x for x, _ in square], [y for _, y in square])
        rows = [(point.rows, point.flops_per_s) for point in ceilings.linear.get(dtype, ())]
        _add_line(figure, 2, f"{dtype} n rows × weights", color, [x for x, _ in rows], [y for _, y in rows], "dot")
    figure.update_xaxes(type="log", title_text="bytes", row=1, col=1)
    figure.update_xaxes(type="log", title_text="n", row=1, col=2)
    figure.update_yaxes(type="log", exponentformat="SI")
    figure.update_layout(title_text=f"{ceilings.device.name}: {ceilings.source}", template="plotly_white")
    return figure


def _add_line(
    figure: "go.Figure", column: int, name: str, color: str, xs: list[int], ys: list[Figure], dash: str = "solid"
) -> None:
    import plotly.graph_objects as go

    if not xs:
        return
    spread = {
        "type": "data",
        "array": [max(0.0, y.high - y.median) for y in ys],
        "arrayminus": [max(0.0, y.median - y.low) for y in ys],
        "thickness": 1,
    }
    line = go.Scatter(
        x=xs,
        y=[y.median for y in ys],
        error_y=spread,
        name=name,
        mode="lines+markers",
        line={"color": color, "dash": dash},
    )
    figure.add_trace(line, row=1, col=column)


def _some(points: tuple[BandwidthPoint, ...], most: int = 5) -> list[BandwidthPoint]:
    """A few points spread over all sizes, the largest among them."""
    step = max(1, -(-len(points) // most))
    return list(points[::-1][::step][::-1])


def _rate(figure: Figure, unit: str) -> tuple[str, str]:
    """The median with its unit, and the quartiles in the same unit without it."""
    scale, prefix = next((pair for pair in _SCALES if figure.median >= pair[0]), (1.0, ""))
    median, low, high = (units.significant(value / scale) for value in (figure.median, figure.low, figure.high))
    return f"{median} {prefix}{unit}", f"{low}–{high}"


def _size(count: int) -> str:
    """Sizes of buffers are powers of two."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= scale:
            return f"{count / scale:g} {unit}"
    return f"{count} B"
