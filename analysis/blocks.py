"""Who owned the time of each step: the stage or part that its picture shows, as arrays over a trace.

One palette serves all pictures (Okabe–Ito, told apart by the colour-blind).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .stage_sums import step_stages
from .trace import Trace

Array = np.ndarray[Any, Any]
BETWEEN = "between"
FORWARD = "forward"
SPAN_BYTES = ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "input_bytes", "output_bytes")
LAYER_COLUMNS = ("step", "layer", "host_ns", "device_ns", "flops", *SPAN_BYTES)
_FALLBACK = ("#D55E00", "#7a6fac", "#4d7f71", "#a26b4a")


@dataclass(frozen=True)
class Block:
    """A kind of work that owns time in a step: a stage, or a part inside the layers."""

    key: str
    label: str
    color: str


BLOCKS = (
    Block("prepare", "prepare inputs", "#8b949e"),
    Block("embed", "embedding", "#56B4E9"),
    Block(FORWARD, "forward (not split)", "#7aa6c2"),
    Block("norm", "norms in layers", "#F0E442"),
    Block("attention", "attention", "#0072B2"),
    Block("mlp", "MLP", "#E69F00"),
    Block("layer", "rest of the layers", "#D55E00"),
    Block("final_norm", "final norm", "#b8ad1f"),
    Block("lm_head", "LM head", "#009E73"),
    Block("sample", "sample and stop check", "#CC79A7"),
    Block("nested", "nested forward", "#5c4b8a"),
    Block("other", "rotary, mask and gaps", "#b3bac2"),
    Block(BETWEEN, "between steps", "#dfe3e8"),
)


@dataclass(frozen=True)
class StepTimes:
    """Top-level steps in the order in which they ran, and who owned their time.

    `time_ns` has a row a step and a column a block; a block that did not run in a step has 0.
    `has_spans` is false where detail was thinned out: such a step is split by its own columns
    into `prepare`, `forward` and `sample`. `counted` is false for cold and discarded steps, which
    statistics leave out.
    """

    step: Array
    call: Array
    prefill: Array
    start_ns: Array
    wall_ns: Array
    has_spans: Array
    counted: Array
    blocks: tuple[Block, ...]
    time_ns: Array

    def __len__(self) -> int:
        return len(self.step)

    def take(self, rows: Array) -> "StepTimes":
        """The same of some steps."""
        arrays = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "blocks"}
        return replace(self, **arrays)


@dataclass(frozen=True)
class SpanBlocks:
    """The spans of top-level steps, sorted by step and start, each with the block that owns it.

    `row` is the span's row in the table, `step` its index in the `StepTimes`, `block` an
    index into `blocks` or -1 where an enclosing span owns its time.
    """

    row: Array
    step: Array
    parent: Array
    block: Array
    blocks: tuple[Block, ...]


def codes(table: pa.Table, name: str) -> tuple[Array, list[str]]:
    """Return a text column as codes (-1 for null) and the words that they stand for."""
    column = table[name].combine_chunks()
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return column.indices.fill_null(-1).to_numpy(zero_copy_only=False), column.dictionary.to_pylist()


def numbers(table: pa.Table, name: str) -> Array:
    """Return a numeric column as float64, NaN for null; integers to 2⁵³ stay exact."""
    return table[name].to_numpy().astype(np.float64)


def first_rank(table: pa.Table) -> pa.Table:
    """Rows of the lowest rank: where several processes share the work, one is drawn."""
    ranks = numbers(table, "rank")
    if not len(ranks) or np.isnan(ranks).all() or (ranks == ranks[0]).all():
        return table
    return table.filter(pa.array(ranks == np.nanmin(ranks)))


def step_rows(trace: Trace) -> pa.Table:
    """Top-level steps in the order in which they ran; cold ones are among them, though no statistics count them."""
    return trace.once("step_rows", lambda: _step_rows(trace))


def _step_rows(trace: Trace) -> pa.Table:
    steps = first_rank(trace.table("steps")).sort_by("step")
    return steps.filter(steps["parent_step"].is_null())


def spans_of_steps(trace: Trace, step_ids: Array, columns: Sequence[str]) -> pa.Table:
    """Some columns of the first rank's spans in these steps; no others are kept in memory."""
    wanted = pa.array(step_ids.astype(np.int64))

    def of_steps(spans: pa.Table) -> pa.Table:
        return spans.filter(pc.is_in(spans["step"], value_set=wanted))

    parts = trace.scan("spans", ("rank", *columns), of_steps)
    return first_rank(_joined(trace, parts, ("rank", *columns)))


def _joined(trace: Trace, parts: list[pa.Table], columns: Sequence[str]) -> pa.Table:
    return pa.concat_tables(parts).unify_dictionaries() if parts else trace.table("spans", columns)


def span_blocks(spans: pa.Table, step_ids: Array) -> SpanBlocks:
    """Give every span of the steps to a block: its stage, or inside a layer its part."""
    step = numbers(spans, "step")
    index = np.searchsorted(step_ids, step)
    known = (index < len(step_ids)) & np.isin(step, step_ids)
    row = np.flatnonzero(known)
    row = row[np.lexsort((numbers(spans, "span")[row], numbers(spans, "start_ns")[row], index[row]))]
    parent = _parent_index(numbers(spans, "span")[row], numbers(spans, "parent")[row])
    names = _block_names(spans, row, parent)
    blocks = ordered_blocks({str(name) for name in np.unique(names) if name})
    place = {item.key: i for i, item in enumerate(blocks)} | {"": -1}
    block = np.array([place[name] for name in names.tolist()], dtype=np.int64)
    return SpanBlocks(row, index[row], parent, block, blocks)


def step_times(trace: Trace) -> StepTimes:
    """Split the time of every top-level step among the blocks that own it."""
    return trace.once("step_times", lambda: _step_times(trace))


def _step_times(trace: Trace) -> StepTimes:
    steps = step_rows(trace)
    step_ids = steps["step"].to_numpy()
    stages = _first_rank_stages(trace, step_ids)
    index = np.searchsorted(step_ids, stages["step"].to_numpy())
    of_row, names = _stage_keys(stages)
    blocks = ordered_blocks({name for name in names if name} | {"prepare", FORWARD, "sample", BETWEEN})
    place = {item.key: i for i, item in enumerate(blocks)} | {"": -1}
    block = np.array([place[name] for name in names] or [-1], dtype=np.int64)[of_row]
    time_ns = _own_times(stages, index, block, place, len(steps))
    has_spans = np.isin(np.arange(len(steps)), index)
    for key, name in (("prepare", "prepare_ns"), (FORWARD, "forward_ns"), ("sample", "sample_ns")):
        time_ns[~has_spans, place[key]] = np.nan_to_num(numbers(steps, name))[~has_spans]
    call, start, wall = numbers(steps, "call"), numbers(steps, "start_ns"), numbers(steps, "wall_ns")
    time_ns[:, place[BETWEEN]] = _between(call, start, wall)
    phase, words = codes(steps, "phase")
    used = np.flatnonzero(time_ns.any(axis=0))
    return StepTimes(
        step=step_ids,
        call=call,
        prefill=np.array([word == "prefill" for word in words] + [False])[phase],
        start_ns=start,
        wall_ns=wall,
        has_spans=has_spans,
        counted=~(_flag(steps, "warmup") | _flag(steps, "discarded")),
        blocks=tuple(blocks[i] for i in used),
        time_ns=time_ns[:, used],
    )


def _first_rank_stages(trace: Trace, step_ids: Array) -> pa.Table:
    """Sums of each stage and part in these steps, of one rank."""
    stages = step_stages(trace)
    if "rank" in stages.column_names:
        stages = first_rank(stages)
    return stages.filter(pc.is_in(stages["step"], value_set=pa.array(step_ids)))


def _stage_keys(stages: pa.Table) -> tuple[Array, list[str]]:
    """A code of the block of each row of sums, and the blocks' keys; empty where the stage around it owns the time."""
    (stage, stage_words), (part, part_words) = codes(stages, "stage"), codes(stages, "part")
    names = [(whole if not part else part if whole == "layer" else "") for whole in stage_words for part in part_words]
    return stage * len(part_words) + part, names


def _own_times(stages: pa.Table, index: Array, block: Array, place: dict[str, int], count: int) -> Array:
    """Time of each block in each of so many steps; a layer's is less that of its parts."""
    time_ns = np.zeros((count, len(place) - 1))
    host, is_part = numbers(stages, "host_ns"), pc.not_equal(stages["part"], "").to_numpy()
    owned = block >= 0
    np.add.at(time_ns, (index[owned], block[owned]), host[owned])
    if "layer" in place:
        inside = owned & is_part
        np.subtract.at(time_ns, (index[inside], place["layer"]), host[inside])
    return np.maximum(time_ns, 0.0)


@dataclass(frozen=True)
class LayerGrid:
    """Whole layers, a cell a layer a step: `line` and `column` say which layer and step each row of `spans` is of."""

    steps: Array
    layers: Array
    spans: pa.Table
    line: Array
    column: Array

    def add_up(self, values: Array) -> Array:
        """Sum values of the spans in each cell, NaN where none ran."""
        cells = np.full((len(self.layers), len(self.steps)), np.nan)
        cells[self.line, self.column] = 0
        np.add.at(cells, (self.line, self.column), values)
        return cells


def layer_grid(trace: Trace) -> LayerGrid:
    """Find the layers' own spans in the steps that count, with their times and work."""
    return trace.once("layer_grid", lambda: _layer_grid(trace))


def _layer_grid(trace: Trace) -> LayerGrid:
    def layers(spans: pa.Table) -> pa.Table:
        whole = pc.and_(pc.is_null(spans["parent"]), pc.equal(spans["stage"].cast(pa.string()), "layer"))
        return spans.select(("rank", *LAYER_COLUMNS)).filter(pc.and_(whole, pc.is_valid(spans["layer"])))

    parts = trace.scan("spans", ("rank", "parent", "stage", *LAYER_COLUMNS), layers)
    spans = first_rank(_joined(trace, parts, ("rank", *LAYER_COLUMNS)))
    spans = spans.filter(pc.is_in(spans["step"], value_set=step_rows(trace)["step"].combine_chunks()))
    steps, column = np.unique(spans["step"].to_numpy(), return_inverse=True)
    layers_, line = np.unique(spans["layer"].to_numpy(), return_inverse=True)
    return LayerGrid(steps.astype(np.int64), layers_.astype(np.int64), spans, line, column)


def layer_times(trace: Trace) -> tuple[Array, Array, Array]:
    """Return step numbers, layers, and the time in ns of each layer in each step (NaN: none)."""
    grid = layer_grid(trace)
    return grid.steps, grid.layers, grid.add_up(numbers(grid.spans, "host_ns"))


def _flag(table: pa.Table, name: str) -> Array:
    return np.asarray(table[name].fill_null(False).to_numpy()).astype(bool)


def _parent_index(span: Array, parent: Array) -> Array:
    """Place of each span's parent among the spans, -1 at the top."""
    order = np.argsort(span)
    found = np.searchsorted(span[order], parent)
    found = order[np.minimum(found, max(len(order) - 1, 0))] if len(order) else found
    return np.where(np.isin(parent, span), found, -1)


def _block_names(spans: pa.Table, row: Array, parent: Array) -> Array:
    """Name the block of each span; empty where the span's time belongs to an enclosing one."""
    stage_code, stage_words = codes(spans, "stage")
    part_code, part_words = codes(spans, "part")
    stage = np.array([*stage_words, "other"], dtype=object)[stage_code[row]]
    part = np.array([*part_words, ""], dtype=object)[part_code[row]]
    names = np.where(parent < 0, stage, "")
    inside = parent >= 0
    in_layer = np.zeros(len(row), dtype=bool)
    in_layer[inside] = (parent[parent[inside]] < 0) & (stage[parent[inside]] == "layer") & (part[inside] != "")
    return np.where(in_layer, part, names)


def ordered_blocks(keys: set[str]) -> tuple[Block, ...]:
    """Return the blocks of these keys in lifecycle order; a part that is not listed stands before the MLP."""
    known = [item for item in BLOCKS if item.key in keys]
    extra = sorted(keys - {item.key for item in BLOCKS})
    place = next((i for i, item in enumerate(known) if BLOCKS.index(item) >= 5), len(known))
    added = [Block(key, key.replace("_", " "), _FALLBACK[i % len(_FALLBACK)]) for i, key in enumerate(extra)]
    return (*known[:place], *added, *known[place:])


def _between(call: Array, start: Array, wall: Array) -> Array:
    """Time from the end of each step to the start of the next step of the same call."""
    after = np.zeros(len(call))
    if len(call) > 1:
        gap = start[1:] - (start[:-1] + wall[:-1])
        after[:-1] = np.where(call[1:] == call[:-1], np.maximum(np.nan_to_num(gap), 0), 0)
    return after
