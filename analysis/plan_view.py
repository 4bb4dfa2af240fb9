"""A plan for people: tables for the terminal, and a page of curves."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import units
from .memory_plan import Fit, Option, Quantity
from .plan_document import Curves, Plan
from .time_plan import StepFloor, step_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#a33333")
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def print_plan(plan: Plan, console: Console, explain: bool = False) -> None:
    """Print a plan, with `explain` each number's formula below it."""
    console.print(Text(_title(plan), style="bold"))
    console.print(Text(_run_words(plan), style="dim"))
    console.print(_parameters(plan))
    for title, rows in (("weights stored as", _stored(plan)), ("memory of the run", plan.memory)):
        _print_quantities(console, title, rows, explain)
    _print_lines(console, _scores(plan), style="dim")
    _print_quantities(console, "training, without activations", plan.training, explain)
    if plan.fit is not None:
        _print_fit(console, plan, plan.fit)
    console.print(_work(plan))
    console.print(_times(plan))
    if explain:
        _print_formulas(console, [(step_name(step)[1], step.formula) for step in plan.steps])
    _print_lines(console, _time_words(plan))
    if plan.against:
        console.print(_against(plan))
    _print_lines(console, [f"note: {note}" for note in plan.notes], style="dim")


def binary(count: int | None) -> str:
    """Bytes in binary units, as memory is sold in: GiB = 2³⁰ B."""
    if count is None:
        return units.NONE
    for scale, unit in _BINARY:
        if abs(count) >= scale:
            return f"{units.significant(count / scale)} {unit}"
    return f"{count} B"


def _title(plan: Plan) -> str:
    return f"{plan.name}: {plan.parameters:,} parameters, {plan.architecture} ({plan.source})"


def _run_words(plan: Plan) -> str:
    given = plan.settings
    kv = f", KV in {given.kv_dtype}" if given.kv_dtype else ""
    dimensions = ", ".join(
        f"{name.replace('_', ' ')} {value:,}" for name, value in plan.dimensions.items() if value is not None
    )
    run = (
        f"{given.dtype}{kv}, {given.attention} attention, batch {given.batch:,}, prompt {given.prompt_length:,}, "
        f"context {given.context:,}"
    )
    return f"{dimensions}\n{run}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), title=None)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _parameters(plan: Plan) -> Table:
    table = _table("\nparameters", "number", "share")
    for row in plan.kinds:
        table.add_row(row.kind, f"{row.parameters:,}", units.share(row.share))
    if plan.tied_head:
        table.add_row("lm_head", "the embedding's matrix", units.NONE)
    table.add_row("all", f"{plan.parameters:,}", "", style="bold")
    for side, share in plan.block_shares.items():
        table.add_row(Text(f"a block's matrices, {side}", style="dim"), "", units.share(share))
    return table


def _stored(plan: Plan) -> list[Quantity]:
    """The weights by format; the two 16-bit types, which are alike in size, in one row."""
    return [
        replace(row, name="float16 or bfloat16") if row.key == "weights_float16" else row
        for row in plan.weights
        if row.key != "weights_bfloat16"
    ]


def _print_quantities(console: Console, title: str, rows: Sequence[Quantity], explain: bool) -> None:
    table = _table(f"\n{title}", "bytes", "10ⁿ", "2ⁿ")
    for row in rows:
        style = "bold" if row.key in ("peak", "training") else ""
        name = row.name.removeprefix("weights, ") if row.key.startswith("weights_") else row.name
        table.add_row(Text(name, style=style), Text(units.count(row.value), style=style), *_rounded(row))
    console.print(table)
    if explain:
        _print_formulas(console, [(row.name.strip(), row.formula) for row in rows])


def _rounded(row: Quantity) -> tuple[str, str]:
    """Bytes in decimal and in binary units."""
    return units.byte_count(row.value), binary(row.value)


def _print_formulas(console: Console, formulas: Iterable[tuple[str, str]]) -> None:
    for name, formula in formulas:
        console.print(Text(f"  {name} = {formula}", style="dim"))


def _scores(plan: Plan) -> list[str]:
    if all(row.key != "scores" for row in plan.memory):
        return []
    shorter, longer, times = plan.score_growth
    kept = "this run writes them" if plan.settings.attention == "eager" else "fused attention never writes them"
    return [f"scores grow with the square: {shorter:,} to {longer:,} tokens is × {times:,}; {kept}"]


def _print_fit(console: Console, plan: Plan, fit: Fit) -> None:
    devices = f"{fit.devices} × {units.byte_count(fit.memory_bytes)}"
    name = f" {plan.settings.gpu}" if plan.settings.gpu else ""
    where = " on the fullest" if fit.devices > 1 else ""
    head = f"\nFITS on {devices}{name}" if fit.fits else f"\nDOES NOT FIT on {devices}{name}"
    console.print(Text(head, style="bold green" if fit.fits else "bold red"))
    word = "spare" if fit.fits else "missing"
    lines = [
        f"needs {fit.needed_bytes:,} B{where} in {fit.moment}; "
        f"{abs(fit.spare_bytes):,} B ({units.byte_count(abs(fit.spare_bytes))}) {word}"
    ]
    if fit.weights_spare_bytes < 0:
        lines.append(
            f"the weights alone are {-fit.weights_spare_bytes:,} B ({units.byte_count(-fit.weights_spare_bytes)}) "
            f"more than {fit.devices * fit.memory_bytes:,} B"
        )
    lines.append(fit.split.words)
    lines += _largest(plan, fit)
    _print_lines(console, lines)
    if not fit.fits:
        _print_lines(console, _options(plan.options))


def _largest(plan: Plan, fit: Fit) -> list[str]:
    batch = "none" if fit.largest_batch is None else f"{fit.largest_batch:,}"
    context = "none" if fit.largest_context is None else f"{fit.largest_context:,}"
    limited = fit.largest_context is not None and fit.largest_context == fit.largest_context_limit
    end = " (where the model ends)" if limited else ""
    given = plan.settings
    return [
        f"largest batch at a context of {given.context:,}: {batch}; "
        f"largest context at a batch of {given.batch:,}: {context}{end}"
    ]


def _options(options: Sequence[Option]) -> list[str]:
    if not options:
        return ["no single change of dtype, KV dtype, batch, context or number of devices makes it fit"]
    return [
        "what fits:",
        *(
            f"  {o.change:<28} needs {o.needed_bytes:,} B a device, {units.byte_count(o.spare_bytes)} spare"
            for o in options
        ),
    ]


def _work(plan: Plan) -> Table:
    """FLOPs exactly: of the pairs that causality and windows let through, and of a dense implementation."""
    table = _table("\nFLOPs, a multiply–add being two", "visible pairs", "dense")
    dense = {row.key: row.value for row in plan.work}
    for row in plan.work:
        if not row.key.endswith("_dense"):
            table.add_row(row.name, units.count(row.value), units.count(dense.get(f"{row.key}_dense", row.value)))
    return table


def _times(plan: Plan) -> Table:
    table = _table("\nleast time, a floor", "FLOPs", "bytes", "FLOP/B", "bound", "at least")
    for step in plan.steps:
        table.add_row(
            step_name(step)[1],
            units.flop_count(step.flops),
            units.byte_count(step.bytes_),
            units.NONE if step.intensity is None else units.significant(step.intensity),
            f"{step.bound} ≈ {step.close_to}" if step.close_to else step.bound,
            units.time(step.floor_ns),
        )
    return table


def _time_words(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan.ceilings_source is None:
        return ["no device was named: with --gpu NAME there are times, bounds and turning points"]
    steps = plan.settings.new_tokens - 1
    if plan.generate_floor_ns is not None and steps:
        lines.append(f"the prefill and {steps:,} decode steps take {units.time(plan.generate_floor_ns)} at least")
    found, parts = plan.crossovers, []
    turn = "decode stays memory-bound at any batch at this context"
    if found.decode_batch is not None:
        turn = f"decode turns compute-bound at a batch of {found.decode_batch:,}"
    parts.append(turn)
    if found.prefill_length is not None:
        parts.append(f"prefill turns compute-bound at a prompt of {found.prefill_length:,} tokens")
    if found.kv_context is not None:
        parts.append(f"a decode step reads more KV than weights from {found.kv_context:,} positions on")
    lines.append("; ".join(parts))
    return [*lines, f"ceilings: {plan.ceilings_source}; what kernels reach, launches and links are not in them"]


def _against(plan: Plan) -> Table:
    table = _table("\nplan against this trace", "planned", "measured", "residual")
    for row in plan.against:
        residual = units.NONE if row.residual_share is None else f"{row.residual_share:+.2%}"
        table.add_row(row.name, units.count(row.predicted), units.count(row.measured), residual)
    return table


def _print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style))


# -- page --------------------------------------------------------------------------------------


def plan_page(plan: Plan, curves: Curves) -> str:
    """A page of its own, with no network: memory over context, decode over batch, prefill over prompts."""
    page: str = plan_figure(plan, curves).to_html(include_plotlyjs=True, full_html=True)
    return page


def plan_figure(plan: Plan, curves: Curves) -> "go.Figure":
    """Three pictures beside each other; times are floors, and absent where no device is named."""
    from plotly.subplots import make_subplots

    titles = (
        "memory over context",
        "least time of a decode step over batch",
        "least time of a prefill over its prompt",
    )
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.07)
    for number, (batch, points) in enumerate(curves.memory.items()):
        _line(figure, 1, f"batch {batch:,}", number, points)
    first = next(iter(curves.memory.values()))
    _line(figure, 1, "weights", 5, [(x, curves.weights) for x, _ in first], "dot")
    if plan.fit is not None:
        memory = plan.fit.memory_bytes * plan.fit.devices
        label = f"{plan.fit.devices} × {units.byte_count(plan.fit.memory_bytes)}"
        _line(figure, 1, label, 6, [(x, memory) for x, _ in first], "dash")
    for number, (context, steps) in enumerate(curves.decode.items()):
        _line(figure, 2, f"context {context:,}", number, _seconds(steps), group="decode")
    _line(figure, 3, "prefill, batch 1", 0, _seconds(curves.prefill), group="prefill")
    figure.update_xaxes(type="log", title_text="positions", row=1, col=1)
    figure.update_xaxes(type="log", title_text="sequences", row=1, col=2)
    figure.update_xaxes(type="log", title_text="prompt tokens", row=1, col=3)
    figure.update_yaxes(type="log", title_text="bytes", exponentformat="SI", row=1, col=1)
    for column in (2, 3):
        figure.update_yaxes(type="log", title_text="seconds", exponentformat="SI", row=1, col=column)
    source = plan.ceilings_source or "no device named, so no times"
    figure.update_layout(
        title_text=f"{plan.name}, {plan.settings.dtype}: {source}", template="plotly_white", height=560
    )
    return figure


def _seconds(steps: Sequence[tuple[int, StepFloor]]) -> list[tuple[int, float]]:
    return [(x, step.floor_ns / 1e9) for x, step in steps if step.floor_ns is not None]


def _line(
    figure: "go.Figure",
    column: int,
    name: str,
    number: int,
    points: Sequence[tuple[int, float]],
    dash: str = "solid",
    group: str = "memory",
) -> None:
    import plotly.graph_objects as go

    if not points:
        return
    line = go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=name,
        legendgroup=group,
        mode="lines+markers",
        line={"color": _COLORS[number % len(_COLORS)], "dash": dash},
    )
    figure.add_trace(line, row=1, col=column)
