"""The walk through a layer in a terminal."""

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from . import units
from .explain import Matmul, Piece, Walk
from .roofline import UNKNOWN, Verdict

WIDE = 100


def print_walk(walk: Walk, console: Console) -> None:
    """Print the pieces of the layer with their products, then what is written for a moment and what stays."""
    console.print(Text(_title(walk), style="bold"))
    console.print(_table(walk, console.width))
    console.print(Group(*(Text(line) for line in _closing(walk))))


def _title(walk: Walk) -> str:
    before = f" after {walk.kv_len_before:,} cached" if walk.kv_len_before else ""
    batch = f" of {walk.batch} sequences" if (walk.batch or 1) > 1 else ""
    positions = f"{walk.q_len:,} position{'s' * (walk.q_len != 1)}" if walk.q_len is not None else "a forward"
    return f"layer {walk.layer} in step {walk.step} ({walk.phase}): {positions}{batch}{before}"


def _table(walk: Walk, width: int) -> Table:
    """A row a piece and a product; in a narrow terminal the shapes stand below the name."""
    wide = width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("what", "shapes") if wide else ("what, shapes",):
        table.add_column(name, overflow="fold")
    for name in ("FLOPs", "bytes", "time", "at best"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound, of roof" if wide else "bound", no_wrap=True)
    for piece in walk.pieces:
        alone = _lone_product(piece)
        table.add_row(*_cells(_piece_row(piece, alone), piece.depth, wide))
        for matmul in piece.matmuls if alone is None else ():
            table.add_row(*_cells(_matmul_row(matmul), piece.depth + 1, wide), style="dim")
    return table


def _lone_product(piece: Piece) -> Matmul | None:
    """The product that a module consists of, as a linear layer does: one row says both."""
    alone = len(piece.matmuls) == 1 and piece.matmuls[0].module == piece.module and piece.matmuls[0].role is None
    return piece.matmuls[0] if alone else None


def _cells(row: tuple[str, str, list[str]], depth: int, wide: bool) -> list[str]:
    name, shapes, figures = row
    indent = "  " * depth
    if wide:
        return [f"{indent}{name}", shapes, *figures]
    for spaced, close in ((" × ", "×"), (" · ", "·"), (" → ", "→"), (", ", ",")):
        shapes = shapes.replace(spaced, close)
    return [f"{indent}{name}" + (f"\n{indent} {shapes}" if shapes else ""), *figures]


def _piece_row(piece: Piece, alone: Matmul | None) -> tuple[str, str, list[str]]:
    what = piece.module.rpartition(".")[2] if alone is not None and piece.module else piece.class_name
    name = " ".join(word for word in ("layer" if piece.depth == 0 else piece.part, what) if word)
    shapes = f"{shape(piece.input_shape)} → {shape(piece.output_shape)}" if piece.input_shape else ""
    figures = [
        units.flop_count(piece.flops),
        units.byte_count(piece.bytes_),
        units.time(piece.time_ns),
        units.time(piece.verdict.roof_ns),
        _bound(piece.verdict),
    ]
    return name, _operands(alone) if alone is not None else shapes, figures


def _matmul_row(matmul: Matmul) -> tuple[str, str, list[str]]:
    figures = [
        units.flop_count(matmul.flops),
        units.byte_count(matmul.operand_bytes),
        "",
        units.time(matmul.verdict.roof_ns),
        _bound(matmul.verdict),
    ]
    return f"· {matmul.role or matmul.module.rpartition('.')[2]}", _operands(matmul), figures


def _operands(matmul: Matmul) -> str:
    heads = f"{matmul.batch} × " if matmul.batch > 1 else ""
    return f"{heads}[{matmul.m:,} × {matmul.k:,}] · [{matmul.k:,} × {matmul.n:,}]"


def _bound(judged: Verdict) -> str:
    if judged.bound == UNKNOWN:
        return units.NONE
    return f"{judged.bound} {units.percent(judged.efficiency)}" if judged.efficiency is not None else judged.bound


def shape(dimensions: tuple[int, ...] | None) -> str:
    """A shape as people write it: [1, 2048, 4096]."""
    return units.NONE if dimensions is None else "[" + ", ".join(f"{size}" for size in dimensions) + "]"


def _closing(walk: Walk) -> list[str]:
    lines = []
    if walk.pieces[0].flops and not any(piece.matmuls for piece in walk.pieces):
        lines.append("products: not known one by one, for this step lies between counted ones that are no line")
    if walk.transient_bytes is not None:
        lines.append(f"transient: the products' results, {units.byte_count(walk.transient_bytes)}, written and dropped")
    if walk.scores is not None:
        lines.append(_scores_line(walk))
    kv = walk.kv
    if kv is not None:
        moved = f"read {units.byte_count(kv.read_bytes)}, wrote {units.byte_count(kv.write_bytes)}"
        copied = f", copied {units.byte_count(kv.copy_bytes)} besides" if kv.copy_bytes else ""
        what = f" of keys and values for {kv.length:,} position{'s' * (kv.length != 1)}" if kv.length else ""
        lines.append(
            f"persistent: {units.byte_count(kv.logical_bytes)}{what} ({kv.kind}, {kv.dtype}); this step {moved}{copied}"
        )
    source = walk.ceilings_source or "none known for this device"
    lines.append(f"ceilings: {source}; “at best” is the larger of FLOPs ÷ peak and bytes ÷ bandwidth")
    return lines


def _scores_line(walk: Walk) -> str:
    scores = walk.scores
    assert scores is not None
    rows, queries, keys = scores.shape
    size = f"{rows:,} × {queries:,} × {keys:,} scores, {units.byte_count(scores.bytes_)}"
    if scores.written is None:
        return f"score matrix: {size}; whether {scores.implementation} attention writes it is not known"
    if scores.written:
        return f"score matrix: {size}, written by eager attention; SDPA and flash attention never write it"
    return f"score matrix: {size}, never written by {scores.implementation} attention; eager attention would write it"
