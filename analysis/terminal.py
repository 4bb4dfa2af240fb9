"""Prints a summary in a terminal: width-aware, and plain text where it goes into a pipe."""

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from . import units
from .breakdown import StageTime
from .console import escaped
from .kv_use import KVUse
from .latency import Latency
from .operators import OperatorTime
from .post_mortem import post_mortem_words
from .ranks import RankTime, rank_words
from .roofline import StageVerdict
from .schema import PHASES
from .summary import Summary
from .verdict_view import bound_cell, lead_rows

# How a run ended that did not come to its end.
ENDED = {
    "running": "goes on still, or was killed", "interrupted": "was interrupted", "failed": "failed",
    "oom": "ran out of memory",
}  # fmt: skip
BAR_WIDTH = 12
OPERATORS_SHOWN = 6
MOST_CHARACTERS = 50_000
WIDE, WIDER = 90, 124  # columns from which there is room for shares beside the bounds, and for bars


def printable(text: str) -> str:
    """Show control characters as their escapes: a text from a model must not steer the terminal.

    Of one that is longer than anyone reads in a terminal, the beginning.
    """
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]} … ({len(text) - MOST_CHARACTERS:,} more characters are in the trace)"
    return escaped(text)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """The headline facts as (name, value), in the order in which they are read."""
    timing = summary.latency
    rows = [
        ("model", _model(summary)),
        ("device", _device(summary)),
        ("TTFT", _first_token(timing)),
        ("TPOT", _output_token(timing)),
        ("tokens/s", _rates(timing)),
        ("tokens", _tokens(summary)),
        ("drafted", _drafted(summary)),
        ("KV cache", _kv(summary)),
        ("FLOPs", _flops(summary)),
        ("peak memory", _memory(summary)),
        ("ranks", " ".join(rank_words(summary.ranks)) or units.NONE),
        ("uncounted", _uncounted(summary)),
        ("traced ÷ untraced", overhead_words(summary)),
    ]
    return [row for row in rows if row[1] != units.NONE]


def _first_token(timing: Latency) -> str:
    """TTFT, and where it went."""
    split = timing.first_token
    if split is None:
        return units.time(timing.ttft_ns)
    parts = [
        (split.tokenize_ns, "tokenize"), (split.prepare_ns, "prepare"), (split.prefill_ns, "prefill"),
        (split.sample_ns, "sample"), (split.other_ns, "other"),
    ]  # fmt: skip
    named = " + ".join(f"{word} {units.time(ns)}" for ns, word in parts if ns)
    return f"{units.time(timing.ttft_ns)} = {named}"


def _output_token(timing: Latency) -> str:
    if timing.tpot_ns is None and timing.itl_p50_ns is None:
        return units.NONE
    return f"{units.time(timing.tpot_ns)}  (p50 {units.time(timing.itl_p50_ns)}, p95 {units.time(timing.itl_p95_ns)})"


def _rates(timing: Latency) -> str:
    if timing.prefill_tokens_per_s is None and timing.decode_tokens_per_s is None:
        return units.NONE
    prefill, decode = timing.prefill_tokens_per_s, timing.decode_tokens_per_s
    return f"prefill {units.rate(prefill, 'tokens/s')}, decode {units.rate(decode, 'tokens/s')}"


def _model(summary: Summary) -> str:
    model = summary.model
    parameters = units.count(model.get("parameters"))
    attention = f"{model['attention']} attention" if model.get("attention") else None
    return _joined(model.get("id"), f"{parameters} parameters", model.get("dtype"), attention)


def _device(summary: Summary) -> str:
    device = summary.device
    count = device.get("threads")
    threads = f" · {count} thread{'s' * (count != 1)}" if device.get("type") == "cpu" and count else ""
    return _joined(device.get("type"), device.get("name")) + threads


def _joined(*words: str | None) -> str:
    return " · ".join(str(word) for word in words if word) or units.NONE


def _tokens(summary: Summary) -> str:
    timing = summary.latency
    if timing.prompt_tokens is None and timing.new_tokens is None:
        return units.NONE
    batch = f" in {timing.sequences} sequences" if (timing.sequences or 1) > 1 else ""
    why = f" (stopped by {summary.stop_reason})" if summary.stop_reason else ""
    return f"{units.count(timing.prompt_tokens)} prompt + {units.count(timing.new_tokens)} new{batch}{why}"


def _drafted(summary: Summary) -> str:
    """How many of the tokens drafted in assisted decoding were accepted."""
    if not summary.drafted or summary.accepted is None:
        return units.NONE
    rate = units.share(summary.accepted / summary.drafted)
    return f"{units.count(summary.drafted)} tokens, {units.count(summary.accepted)} accepted ({rate})"


def _kv(summary: Summary) -> str:
    if summary.kv_bytes is None:
        return units.NONE
    text = f"{units.byte_count(summary.kv_bytes)} for {units.count(summary.kv_positions)} positions"
    if summary.kv_allocated_bytes not in (None, summary.kv_bytes):
        text += f", {units.byte_count(summary.kv_allocated_bytes)} allocated"
    return text + kv_use_words(summary.kv_use)


def kv_use_words(use: KVUse | None) -> str:
    """What of the cache is padding, and what it copied besides, where there is any."""
    words = ""
    if use is not None and use.padding_share:
        words += f", {units.share(use.padding_share)} of it padding"
    if use is not None and use.copied_bytes:
        words += f"; {units.byte_count(use.copied_bytes)} moved besides by its own copying in a call"
    return words


def _memory(summary: Summary) -> str:
    """The peak, what it is made of, and which tensor made it."""
    found = summary.memory
    if found is None:
        return units.byte_count(summary.peak_memory_bytes)
    kinds = ", ".join(f"{kind} {units.byte_count(size)}" for kind, size in found.by_kind().items())
    text = f"{units.byte_count(found.peak_bytes)} in step {found.step} ({found.during}): {kinds}"
    if found.rounding_bytes is not None and found.slack_bytes is not None:
        text += f"; around them the allocator rounds up {units.byte_count(found.rounding_bytes)}"
        text += f" and reserves {units.byte_count(found.slack_bytes)} more"
    return text


def _flops(summary: Summary) -> str:
    if summary.flops_prefill is None and summary.flops_decode is None:
        return units.NONE
    return f"prefill {_flop_count(summary.flops_prefill)}, decode {_flop_count(summary.flops_decode)}"


def _uncounted(summary: Summary) -> str:
    """How much of the time is in modules whose work has no formula; nested spans count once."""
    if not summary.uncounted:
        return units.NONE
    by_span = {entry.get("span"): entry.get("share_of_time") for entry in summary.uncounted}
    shares = [share for share in by_span.values() if share is not None]
    time = units.share(min(sum(shares), 1.0)) if shares else "an unknown share"
    count = len(summary.uncounted)
    return f"{count} module{'s' * (count != 1)} without a formula, in {time} of the time"


def _flop_count(flops: int | None) -> str:
    if flops is None:
        return units.NONE
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= scale:
            return f"{units.significant(flops / scale)} {unit}"
    return f"{flops:,} FLOP"


def overhead_words(summary: Summary) -> str:
    """Traced ÷ untraced with its spread, and whether the tokens agree."""
    overhead = summary.overhead
    if not overhead:
        return units.NONE
    pairs = len(overhead["traced_s"])
    spread = (
        f" ({overhead['ratio_low']:.3f}–{overhead['ratio_high']:.3f} in {pairs} pairs)" if pairs > 1 else " (one pair)"
    )
    same = "tokens identical" if overhead["tokens_identical"] else "TOKENS DIFFER"
    noise = f"; equal runs differ by {overhead['noise'] - 1:.1%}" if overhead.get("noise") else ""
    return f"{overhead['ratio']:.3f}{spread}, {same}{noise}"


def print_summary(summary: Summary, console: Console) -> None:
    """Print the generated text, the headline facts and where the time of both phases went."""
    for text in summary.output or ():
        console.print(Panel(Text(printable(text)), title="generated", title_align="left", box=box.ROUNDED))
    if summary.status != "complete":
        ended = ENDED.get(summary.status, f"has the status {printable(summary.status)}")
        console.print(Text(f"This run {ended}; what follows is what was recorded.", style="bold yellow"))
    for sentence in post_mortem_words(summary.post_mortem) if summary.post_mortem else ():
        console.print(Text(printable(sentence), style="bold"))
    console.print(_grid(lead_rows(summary.verdicts)))
    console.print()
    console.print(_grid(summary_rows(summary)))
    if summary.stages:
        console.print()
        console.print(_stage_title(summary))
        console.print(_stage_table(summary, console.width))
    if summary.ranks:
        console.print("the processes, in one call; of it communication: talking to the others and waiting for them")
        console.print(_rank_table(summary.ranks))
    if summary.operators:
        console.print("operators of the profiled steps, slowest first; own time, a step")
        console.print(_operator_table(summary.operators))
    for note in summary.notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def _grid(rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, value in rows:
        grid.add_row(Text(name), Text(printable(value)))
    return grid


def _stage_title(summary: Summary) -> str:
    title = "where the time went, in one call"
    if summary.steps_recorded < summary.steps:
        return f"{title} (spans of {summary.steps_recorded} of {summary.steps} steps were recorded and stand for all)"
    return title


def _stage_table(summary: Summary, width: int) -> Table:
    """Prefill beside decode, each of one call; parts indented below their stage; the whole last.

    Beside each time stands what bounds it, with roof ÷ measured.
    """
    stages = summary.stages
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for phase in PHASES:
        steps = summary.steps_per_call.get(phase, 0)
        table.add_column(f"{phase}, {steps:g} step{'s' * (steps != 1)}", justify="right")
        if width >= WIDE:
            table.add_column("share", justify="right")
        table.add_column("bound, of roof", no_wrap=True)
        if width >= WIDER:
            table.add_column("", justify="left", no_wrap=True)
    for stage, part in _order(stages):
        cells: list[Text] = [Text(f"  {part}" if part else stage, style="dim" if part else "")]
        for phase in PHASES:
            row = next((s for s in stages if (s.phase, s.stage, s.part) == (phase, stage, part)), None)
            cells += _cells(row, summary.verdicts.stage(phase, stage, part), width)
        table.add_row(*cells)
    total = [sum(s.time_ns for s in stages if s.phase == phase and s.part is None) for phase in PHASES]
    table.add_section()
    blanks = [""] * (1 + (width >= WIDE) + (width >= WIDER))
    table.add_row("all", *(cell for ns in total for cell in (units.time(ns) if ns else units.NONE, *blanks)))
    return table


def _rank_table(ranks: list[RankTime]) -> Table:
    """Each process with its time in both phases, and the share of it that is communication."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("status")
    for phase in PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
        table.add_column("of it", justify="right", no_wrap=True)
    by_rank: dict[int, dict[str, RankTime]] = {}
    for row in ranks:
        by_rank.setdefault(row.rank, {})[row.phase] = row
    for rank, times in sorted(by_rank.items()):
        status = next(iter(times.values())).status
        cells = [str(rank), printable(status)]
        for phase in PHASES:
            known = times.get(phase)
            cells += [units.time(known.time_ns), units.share(known.share)] if known else [units.NONE, ""]
        table.add_row(*cells)
    return table


def _operator_table(operators: list[OperatorTime]) -> Table:
    """The slowest operators of each phase, with where they ran."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("phase", "where", "operator"):
        table.add_column(name, overflow="fold")
    for name in ("times", "time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in PHASES:
        for row in [row for row in operators if row.phase == phase][:OPERATORS_SHOWN]:
            where = ", ".join(word for word in (row.stage, row.part) if word)
            table.add_row(phase, where, row.op, f"{row.count:,.0f}", units.time(row.time_ns), units.share(row.share))
    return table


def _cells(row: StageTime | None, judged: StageVerdict | None, width: int) -> list[Text]:
    style = "dim" if row is not None and row.part else ""
    cells = [Text(units.time(row.time_ns) if row is not None else units.NONE, style)]
    if width >= WIDE:
        cells.append(Text(units.share(row.share) if row is not None else "", style))
    cells.append(Text(bound_cell(judged) if row is not None else "", style))
    if width >= WIDER:
        cells.append(Text("█" * round(row.share * BAR_WIDTH) if row is not None and not row.part else "", "cyan"))
    return cells


def _order(stages: list[StageTime]) -> list[tuple[str, str | None]]:
    """Stages and parts of both phases, each once, in the order of the phase that has the most of them."""
    by_phase = [[(s.stage, s.part) for s in stages if s.phase == phase] for phase in PHASES]
    longest, other = sorted(by_phase, key=len, reverse=True)
    return longest + [key for key in other if key not in longest]
