"""Completes a trace with the work of each step: replays its signatures and fills in the null columns."""

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lifetrace.analysis import schema
from lifetrace.hooks.counting import CallCount, ForwardCount
from lifetrace.hooks.kvcache import LayerKV
from lifetrace.hooks.kvstate import KVLayout, KVState
from lifetrace.hooks.recorder import Signature, Step
from lifetrace.hooks.replay import Replayer, ReplayError
from lifetrace.hooks.stages import Lifecycle

NUMBERS = ("input_bytes", "output_bytes", "weight_bytes", "flops", "flops_dense")
TRAFFIC = ("kv_read_bytes", "kv_write_bytes", "kv_copy_bytes")
OUTSIDE = ("tokenize", "prepare", "sample", "detokenize")
CORE = "\0core"  # stands behind an attention module's name for its work outside its inner modules
MAX_REPLAYS = 96
WEIGHTS = NUMBERS.index("weight_bytes")
UNKNOWN = -1
FLOPS = 1  # where they stand in the numbers of a whole step: weight bytes before them


@dataclass(frozen=True)
class WorkTable:
    """Work of every call of one forward, as numbers that may be interpolated.

    `numbers[i]` are the NUMBERS of call `keys[i]`, UNKNOWN where there is no count; `step` are
    those of the whole forward with its activation bytes and the known FLOPs appended.
    `choosers[i]` are the expert calls inside call i, whose weights are read as the router chose
    and stand in no number. `gaps_free` says that all products are inside the stages.
    """

    keys: tuple[tuple[str, int], ...]
    numbers: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    choosers: tuple[tuple[tuple[str, int], ...], ...]
    step_choosers: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[Any, Any, Any], ...]
    gaps_free: bool
    unknown: frozenset[tuple[str, str]]
    products: tuple[dict[str, Any], ...]


@dataclass
class Family:
    """Steps whose signatures differ only in how many positions their cache holds."""

    signature: Signature
    model: int = 0
    steps: MutableSequence[int] = field(default_factory=lambda: array("q"))
    lengths: MutableSequence[int] = field(default_factory=lambda: array("q"))


Traffic = tuple[tuple[int | None, ...], ...]


class CacheLog:
    """Remembers the traffic of each step in a few numbers.

    A cache that grows evenly is its one reading and by how much it has grown; of others, whose
    traffic mostly repeats, each distinct one is kept once.
    """

    def __init__(self) -> None:
        self._layouts: dict[int, KVLayout] = {}
        self._distinct: dict[Traffic, Traffic] = {}
        self._even = array("q")  # step, layout before and after, growth before and after, q_len
        self._other: dict[int, Traffic] = {}
        self._place: dict[int, int] = {}

    def note(self, step: int, before: KVState, after: KVState, q_len: int) -> None:
        """Remember a step's cache."""
        if not (before.layout.grows_evenly and after.layout.grows_evenly):
            found = kv_traffic(before.layers, after.layers, q_len)
            self._other[step] = self._distinct.setdefault(found, found)
            return
        for state in (before, after):
            self._layouts[id(state.layout)] = state.layout
        self._even.extend((step, id(before.layout), id(after.layout), before.grown, after.grown, q_len))

    def traffic(self, step: int) -> Traffic | None:
        """Bytes read, written and copied besides by each cache layer in a step; None where unknown."""
        if step in self._other:
            return self._other[step]
        if len(self._place) < len(self._even) // 6:
            self._place = {self._even[start]: start for start in range(0, len(self._even), 6)}
        start = self._place.get(step)
        if start is None:
            return None
        _, before, after, grown_before, grown_after, q_len = self._even[start : start + 6]
        states = KVState(self._layouts[before], grown_before), KVState(self._layouts[after], grown_after)
        return kv_traffic(states[0].layers, states[1].layers, q_len)


@dataclass
class WorkLog:
    """What the steps of a run leave behind for counting: their families, and the states of their caches."""

    families: dict[tuple[Any, ...], Family] = field(default_factory=dict)
    caches: CacheLog = field(default_factory=CacheLog)
    experts: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)
    recomputing: list[tuple[int, Signature]] = field(default_factory=list)
    uncountable: set[str] = field(default_factory=set)

    def note(self, steps: Iterable[Step]) -> None:
        """Remember the signatures of finished steps, and their caches before and after."""
        for step in steps:
            signature = step.signature
            if signature is None or step.failed:
                continue
            if step.call.kind == "generate" and not step.prefill and not signature.use_cache:
                self.recomputing.append((step.index, signature))
            if step.chosen_experts:
                self.experts[step.index] = step.distinct_experts()
            self.caches.note(step.index, step.kv_before, step.kv_after, signature.q_len)
            if signature.kv_len_before is None:
                self.uncountable.add("the cache does not say how many positions it holds")
            else:
                key = (step.model, *_family_key(signature))
                family = self.families.setdefault(key, Family(signature, step.model))
                family.steps.append(step.index)
                family.lengths.append(signature.kv_len_before)

    def traffic(self, step: int) -> tuple[tuple[int | None, ...], ...] | None:
        """Bytes read, written and copied besides by each cache layer in a step; None where unknown."""
        return self.caches.traffic(step)


def _family_key(signature: Signature) -> tuple[Any, ...]:
    """What steps of one family share; `kv` is one object for all caches of one make."""
    return (
        signature.batch,
        signature.q_len,
        id(signature.kv),
        signature.cache_class,
        signature.head_positions,
        signature.embeds,
        signature.use_cache,
        signature.extras,
    )


def kv_traffic(before: Sequence[LayerKV], after: Sequence[LayerKV], q_len: int) -> tuple[tuple[int | None, ...], ...]:
    """Bytes read, written and copied besides, for each cache layer of a step.

    Attention reads what is held before the step (all slots of a static layer) and writes the new
    positions. A layer that grows by concatenation reads and writes all it holds once more at
    each append. Of quantized layers only the write is known.
    """
    return tuple(
        _layer_traffic(held, layer, q_len) for held, layer in itertools.zip_longest(before[: len(after)], after)
    )


def _layer_traffic(before: LayerKV | None, after: LayerKV, q_len: int) -> tuple[int | None, int | None, int | None]:
    held = before.logical_bytes if before is not None else 0
    if after.kind in ("shared", "empty"):
        return 0, 0, 0
    if after.kind == "state":
        return held, after.logical_bytes, 0
    if after.kind in ("quantized", "hybrid") or not after.length:
        return None, None, None
    per_position = after.logical_bytes // after.length
    written = per_position * min(q_len, after.length)
    if after.capacity is not None:
        return per_position * after.capacity, written, 0
    return held, written, 2 * held


def work_table(count: ForwardCount, lifecycle: Lifecycle) -> WorkTable:
    """Lay the call tree of a forward out as a table."""
    keys, numbers, choosers, shapes, products = [], [], [], [], []
    unknown: set[tuple[str, str]] = set()
    for call in count.root.walk():
        unknown |= {(call.module, operator) for operator in call.unknown}
        products += _product_rows(call)
        if call is count.root:
            continue
        keys.append((call.module, call.call_index))
        numbers.append(_numbers(call))
        choosers.append(_choosers(call.walk()))
        shapes.append((call.input_shape, call.output_shape, call.dtype))
        keys.append((call.module + CORE, call.call_index))
        numbers.append(_own_numbers(call))
        choosers.append(_choosers([call]))
        shapes.append((None, None, None))
    top = list(_outermost(count.root, lifecycle))
    activations = sum(call.input_bytes + call.output_bytes for call in top)
    known = sum(product.flops for product in count.root.products())
    step = [*_numbers(count.root)[2:], activations, known]
    return WorkTable(
        tuple(keys),
        np.array(numbers, dtype=np.int64).reshape(len(keys), len(NUMBERS)),
        np.array(step, dtype=np.int64),
        tuple(choosers),
        _choosers(count.root.walk()),
        tuple(shapes),
        not any(call.own or call.unknown for call in _around(count.root, lifecycle)),
        frozenset(unknown),
        tuple(products),
    )


def _numbers(call: CallCount) -> list[int]:
    weights = list(call.weights_inside().values())
    known = not call.unknown_inside()
    products = list(call.products())
    return [
        call.input_bytes,
        call.output_bytes,
        sum(size for size in weights if size is not None),
        sum(product.flops for product in products) if known else UNKNOWN,
        sum(product.flops_dense for product in products) if known else UNKNOWN,
    ]


def _own_numbers(call: CallCount) -> list[int]:
    """Work of a call outside the calls inside it: the attention core, seen from its module."""
    known = not call.unknown
    flops = sum(product.flops for product in call.own) if known else UNKNOWN
    dense = sum(product.flops_dense for product in call.own) if known else UNKNOWN
    weights = list(call.weights.values())
    read = sum(size for size in weights if size is not None)
    return [*_core_boundary(call), read, flops, dense]


def _core_boundary(call: CallCount) -> tuple[int, int]:
    """Bytes of the queries that attention is given and of what it returns; keys and values are KV traffic."""
    attention = [product for product in call.own if product.attention]
    if len(attention) != 2 or call.dtype is None:
        return UNKNOWN, UNKNOWN
    item_bytes = getattr(torch, call.dtype).itemsize
    scores, mixed = attention
    return scores.batch * scores.m * scores.k * item_bytes, mixed.batch * mixed.m * mixed.n * item_bytes


def _choosers(calls: Iterable[CallCount]) -> tuple[tuple[str, int], ...]:
    """The calls of those given that read of their weights what a router chose."""
    return tuple((call.module, call.call_index) for call in calls if None in call.weights.values())


def _outermost(call: CallCount, lifecycle: Lifecycle) -> Iterable[CallCount]:
    """The stages of a forward: the outermost calls that have a place in the lifecycle."""
    for inner in call.inner:
        if inner.module in lifecycle.places:
            yield inner
        else:
            yield from _outermost(inner, lifecycle)


def _around(call: CallCount, lifecycle: Lifecycle) -> Iterable[CallCount]:
    """The model and the modules around its stages, which are themselves no stage."""
    yield call
    for inner in call.inner:
        if inner.module not in lifecycle.places:
            yield from _around(inner, lifecycle)


def _product_rows(call: CallCount) -> list[dict[str, Any]]:
    return [
        {
            "module": call.module,
            "call_index": call.call_index,
            "order": order,
            "m": product.m,
            "n": product.n,
            "k": product.k,
            "batch": product.batch,
            "flops": product.flops_dense,
            "operand_bytes": product.operand_bytes,
        }
        for order, product in enumerate(call.own)
    ]


class Interpolation:
    """Work of a family at any cache length between those it was asked for, by few replays.

    Raises:
        ReplayError: when the model cannot be replayed, or its counts are not piecewise affine.
    """

    def __init__(self, replayer: Replayer, lifecycle: Lifecycle, family: Family) -> None:
        self.replayer = replayer
        self.lifecycle = lifecycle
        self.signature = family.signature
        self.counted: dict[int, WorkTable] = {}
        self.pieces: list[tuple[int, int]] = []
        self._divide(min(family.lengths), max(family.lengths))

    def at(self, length: int) -> WorkTable:
        """The work with so many positions in the cache."""
        if length in self.counted:
            return self.counted[length]
        low, high = next(piece for piece in self.pieces if piece[0] < length < piece[1])
        return _between(self.counted[low], self.counted[high], low, high, length)

    def _count(self, length: int) -> WorkTable:
        if length not in self.counted:
            if len(self.counted) >= MAX_REPLAYS:
                raise ReplayError(f"counts do not follow the cache length in fewer than {MAX_REPLAYS} pieces")
            self.counted[length] = work_table(self.replayer.count(self.signature, length), self.lifecycle)
        return self.counted[length]

    def _divide(self, low: int, high: int) -> None:
        first, last = self._count(low), self._count(high)
        if high - low < 2:
            return
        middle = (low + high) // 2
        if first.keys == last.keys and _equal(_between(first, last, low, high, middle), self._count(middle)):
            self.pieces += [(low, middle), (middle, high)]
            return
        self._divide(low, middle)
        self._divide(middle, high)


def _between(first: WorkTable, last: WorkTable, low: int, high: int, length: int) -> WorkTable:
    """The table at a length on the line between two others."""
    return replace(
        first,
        numbers=_line(first.numbers, last.numbers, low, high, length),
        step=_line(first.step, last.step, low, high, length),
        shapes=tuple(_shapes_between(a, b, low, high, length) for a, b in zip(first.shapes, last.shapes, strict=True)),
    )


def _line(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], low: int, high: int, at: int) -> npt.NDArray[np.int64]:
    return a + (b - a) * (at - low) // (high - low)


def _shapes_between(a: Any, b: Any, low: int, high: int, at: int) -> Any:
    if a == b:
        return a
    shapes = [
        tuple(x + (y - x) * (at - low) // (high - low) for x, y in zip(first, last, strict=True))
        if first is not None and last is not None
        else None
        for first, last in zip(a[:2], b[:2], strict=True)
    ]
    return (*shapes, a[2])


def _equal(a: WorkTable, b: WorkTable) -> bool:
    same_numbers = np.array_equal(a.numbers, b.numbers) and np.array_equal(a.step, b.step)
    return a.keys == b.keys and same_numbers and a.shapes == b.shapes


@dataclass(frozen=True)
class OperatorTable:
    """Operators that a forward launches: all of them, and those inside each call, keyed as in a `WorkTable`."""

    total: int
    inside: dict[tuple[str, int], int]

    @classmethod
    def of(cls, root: CallCount) -> "OperatorTable":
        """Lay out the call tree of a forward."""
        calls = [call for call in root.walk() if call is not root]
        inside = {(call.module, call.call_index): call.operators_inside() for call in calls}
        own = {(call.module + CORE, call.call_index): call.operators for call in calls}
        return cls(root.operators_inside(), inside | own)


class Completion:
    """Fills the columns of steps and spans that were null while the run went."""

    def __init__(self, log: WorkLog, expert_bytes: dict[str, int], loaded_bytes: dict[str, int]) -> None:
        self.log = log
        self.expert_bytes = expert_bytes
        self.loaded_bytes = loaded_bytes
        self.of_step: dict[int, WorkTable] = {}
        self.operators_of_step: dict[int, OperatorTable] = {}
        self.failures = log.uncountable
        self.time_ns: Counter[str | None] = Counter()
        self.products: list[dict[str, Any]] = []

    def replay(self, replayer: Replayer, lifecycle: Lifecycle, model: int = 0) -> None:
        """Count every family of a model; one that cannot be replayed leaves its steps null, with the reason."""
        for number, family in enumerate(self.log.families.values()):
            if family.model != model:
                continue
            try:
                interpolation = Interpolation(replayer, lifecycle, family)
                tables = {length: interpolation.at(length) for length in set(family.lengths)}
            except ReplayError as error:
                self.failures.add(str(error))
                continue
            for step, length in zip(family.steps, family.lengths, strict=True):
                self.of_step[step] = tables[length]
            for length, table in interpolation.counted.items():
                steps = [s for s, at in zip(family.steps, family.lengths, strict=True) if at == length]
                self.products += [{"signature": number, "steps": steps, **row} for row in table.products if steps]

    def count_operators(self, replayer: Replayer, model: int = 0) -> set[str]:
        """Count the operators of every family of a model, once each; return why some could not be.

        They do not depend on how many positions the cache holds, as long as it holds some.
        """
        reasons = set()
        for family in self.log.families.values():
            if family.model != model:
                continue
            length = min((length for length in family.lengths if length), default=0)
            try:
                table = OperatorTable.of(replayer.operators(family.signature, length))
            except ReplayError as error:
                reasons.add(str(error))
                continue
            self.operators_of_step |= dict.fromkeys(family.steps, table)
        return reasons

    def recomputed(self, replayer: Replayer, lifecycle: Lifecycle) -> tuple[int, int] | None:
        """FLOPs of the decode steps that ran without a KV cache, and what they would be with one.

        None where every step had its cache, or something could not be counted.
        """
        if not self.log.recomputing:
            return None
        steps, signatures = zip(*self.log.recomputing, strict=True)
        one = signatures[0]._replace(q_len=1, head_positions=1, use_cache=True)
        cached = Family(one, lengths=[signature.q_len - 1 for signature in signatures])
        try:
            interpolation = Interpolation(replayer, lifecycle, cached)
        except ReplayError as error:
            self.failures.add(str(error))
            return None
        done = [int(self.of_step[step].step[FLOPS]) for step in steps if step in self.of_step]
        needed = [int(interpolation.at(length).step[FLOPS]) for length in cached.lengths]
        return (sum(done), sum(needed)) if len(done) == len(needed) and UNKNOWN not in done + needed else None

    def uncounted(self) -> list[dict[str, Any]]:
        """Modules that ran an operator without formula, with its names and their share of the recorded time.

        The share is of the innermost span that holds the module; call it after `spans`.
        """
        pairs = sorted(set().union(*(table.unknown for table in self.of_step.values())))
        whole = self.time_ns.get(None, 0)
        found = []
        for module, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            span = module
            while span and span not in self.time_ns:
                span = span.rpartition(".")[0]
            share = self.time_ns[span] / whole if span in self.time_ns and whole else None
            operators = [operator for _, operator in group]
            found.append({"module": module, "operators": operators, "span": span or None, "share_of_time": share})
        return found

    def steps(self, rows: pa.Table) -> pa.Table:
        """Fill a part of the steps table."""
        names = ("weight_bytes", "flops", "flops_dense", "activation_bytes", "flops_counted")
        indices = rows["step"].to_pylist()
        work = [self.of_step.get(step) for step in indices]
        for position, name in enumerate(names):
            values = [_known(table.step[position]) if table is not None else None for table in work]
            if name == "weight_bytes":
                values = [
                    self._with_experts(value, table.step_choosers, step) if table is not None else None
                    for value, table, step in zip(values, work, indices, strict=True)
                ]
            rows = set_column(rows, name, pa.array(values, type=pa.int64()))
        launched = [self.operators_of_step.get(step) for step in indices]
        counts = [table.total if table is not None else None for table in launched]
        rows = set_column(rows, "op_count", pa.array(counts, type=pa.int64()))
        traffic = [self.log.traffic(step) for step in indices]
        for position, name in enumerate(TRAFFIC):
            values = [_total(layers, position) for layers in traffic]
            rows = set_column(rows, name, pa.array(values, type=pa.int64()))
        return rows

    def _with_experts(self, known: int | None, choosers: Iterable[tuple[str, int]], step: int) -> int | None:
        """Weight bytes with those of the distinct experts that were used; None where a choice was not seen."""
        chosen = self.log.experts.get(step, {})
        for key in choosers:
            if known is None or key not in chosen or key[0] not in self.expert_bytes:
                return None
            known += chosen[key] * self.expert_bytes[key[0]]
        return known

    def spans(self, rows: pa.Table) -> pa.Table:
        """Fill a part of the spans table."""
        self._add_times(rows)
        codes, keys = _call_codes(rows)
        steps = rows["step"].to_numpy(zero_copy_only=False)
        filler = _SpanFiller(len(rows), keys)
        boundaries = np.flatnonzero(steps[1:] != steps[:-1]) + 1 if len(steps) else np.array([], dtype=np.int64)
        for block in np.split(np.arange(len(rows)), boundaries):
            # A part without tokenize or detokenize holds whole numbers, one with them NaN for no step.
            step = int(steps[block[0]]) if len(block) and steps[block[0]] == steps[block[0]] else None
            if step is not None and (table := self.of_step.get(step)) is not None:
                filler.fill(block, codes[block], table, partial(self._with_experts, step=step))
            if step is not None and (launched := self.operators_of_step.get(step)) is not None:
                filler.fill_operators(block, codes[block], launched)
        return self._kv_columns(self._free_rows(filler.set_columns(rows)))

    def _add_times(self, rows: pa.Table) -> None:
        """Add up the time of each module, and under None that of all stages."""
        fields = (rows[name].to_pylist() for name in ("step", "module", "parent", "part", "host_ns"))
        for step, module, parent, part, host_ns in zip(*fields, strict=True):
            if module is not None and not schema.is_aside(part):
                self.time_ns[module] += host_ns
            if parent is None and step is not None:
                self.time_ns[None] += host_ns

    def _free_rows(self, rows: pa.Table) -> pa.Table:
        """What the loop does itself holds no product: a true 0, unless a forward runs inside of it.

        The gaps between stages are such rows where the modules around the stages have no product
        of their own. What brings weights reads those of its module.
        """
        columns = (rows[name].to_pylist() for name in ("step", "stage", "part", "module"))
        fields = list(zip(*columns, strict=True))
        nested = {step for step, stage, *_ in fields if stage == "nested"}
        free = [
            schema.is_aside(part)
            or (
                module is None
                and step not in nested
                and (stage in OUTSIDE or (stage == "other" and self._gaps_free(step)))
            )
            for step, stage, part, module in fields
        ]
        for name in ("flops", "flops_dense", "weight_bytes"):
            values = [0 if is_free else value for is_free, value in zip(free, rows[name].to_pylist(), strict=True)]
            if name == "weight_bytes" and self.loaded_bytes:
                values = [
                    self.loaded_bytes.get(module, 0) if schema.brings_weights(part) else value
                    for (_, _, part, module), value in zip(fields, values, strict=True)
                ]
            rows = set_column(rows, name, pa.array(values, type=pa.int64()))
        return rows

    def _gaps_free(self, step: int) -> bool:
        table = self.of_step.get(step)
        return table is not None and table.gaps_free

    def _kv_columns(self, rows: pa.Table) -> pa.Table:
        """KV traffic stands on a layer, its attention and its attention core."""
        columns: dict[str, list[int | None]] = {name: [] for name in TRAFFIC}
        parts = (None, "attention", "attention_core")
        fields = (rows[name].to_pylist() for name in ("step", "stage", "layer", "part"))
        traffic_of = lru_cache(maxsize=4)(self.log.traffic)
        for step, stage, layer, part in zip(*fields, strict=True):
            traffic = traffic_of(step) if step is not None else None
            moves = stage == "layer" and part in parts and layer is not None
            for position, name in enumerate(TRAFFIC):
                if traffic is None or (stage in ("layer", "nested") and not moves and part is None):
                    columns[name].append(None)
                elif moves and layer < len(traffic):
                    columns[name].append(traffic[layer][position])
                else:
                    columns[name].append(0)
        for name, values in columns.items():
            rows = set_column(rows, name, pa.array(values, type=pa.int64()))
        return rows


class _SpanFiller:
    """Collects the completed columns of one part, whose spans are of the calls `keys`."""

    def __init__(self, length: int, keys: Sequence[tuple[str, int] | None]) -> None:
        self.keys = keys
        self.numbers = np.full((length, len(NUMBERS)), UNKNOWN, dtype=np.int64)
        self.operators = np.full(length, UNKNOWN, dtype=np.int64)
        self.shapes = np.zeros(length, dtype=np.int64)
        self._shape_numbers: dict[tuple[Any, Any, Any], int] = {(None, None, None): 0}
        self._rows_of: dict[int, npt.NDArray[np.int64]] = {}
        self._shapes_of: dict[int, npt.NDArray[np.int64]] = {}
        self._counts_of: dict[int, npt.NDArray[np.int64]] = {}

    def fill(
        self,
        block: npt.NDArray[np.int64],
        codes: npt.NDArray[np.int64],
        table: WorkTable,
        with_experts: Callable[[int, Iterable[tuple[str, int]]], int | None],
    ) -> None:
        """Fill the rows of one step from its work."""
        if id(table) not in self._rows_of:
            self._rows_of[id(table)] = self._rows(table)
            self._shapes_of[id(table)] = self._shapes(table)
        rows = self._rows_of[id(table)][codes]
        known = rows >= 0
        block, rows = block[known], rows[known]
        self.numbers[block] = table.numbers[rows]
        self.shapes[block] = self._shapes_of[id(table)][rows]
        if table.step_choosers:
            for position, row in zip(block.tolist(), rows.tolist(), strict=True):
                if table.choosers[row]:
                    weights = with_experts(int(table.numbers[row, WEIGHTS]), table.choosers[row])
                    self.numbers[position, WEIGHTS] = UNKNOWN if weights is None else weights

    def fill_operators(
        self, block: npt.NDArray[np.int64], codes: npt.NDArray[np.int64], launched: OperatorTable
    ) -> None:
        """Fill in how many operators the rows of one step launched."""
        if id(launched) not in self._counts_of:
            counts = [UNKNOWN if key is None else launched.inside.get(key, UNKNOWN) for key in self.keys]
            self._counts_of[id(launched)] = np.array(counts, dtype=np.int64)
        self.operators[block] = self._counts_of[id(launched)][codes]

    def _rows(self, table: WorkTable) -> npt.NDArray[np.int64]:
        """Where in the table each call stands, -1 where it does not."""
        row_of = {key: number for number, key in enumerate(table.keys)}
        return np.array([-1 if key is None else row_of.get(key, -1) for key in self.keys], dtype=np.int64)

    def _shapes(self, table: WorkTable) -> npt.NDArray[np.int64]:
        """The numbers of the table's shapes among all distinct ones of the part."""
        numbers = self._shape_numbers
        return np.array([numbers.setdefault(shape, len(numbers)) for shape in table.shapes], dtype=np.int64)

    def set_columns(self, rows: pa.Table) -> pa.Table:
        """Put the columns into the part."""
        for position, name in enumerate(NUMBERS):
            values = self.numbers[:, position]
            rows = set_column(rows, name, pa.array(values, mask=values == UNKNOWN))
        rows = set_column(rows, "op_count", pa.array(self.operators, mask=self.operators == UNKNOWN))
        distinct = list(self._shape_numbers)
        for position, name in enumerate(("input_shape", "output_shape", "dtype")):
            column = schema.SPANS.schema.field(name)
            plain = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            array = pa.array([shape[position] for shape in distinct], type=plain).take(pa.array(self.shapes))
            rows = set_column(rows, name, array.dictionary_encode() if plain is not column.type else array)
        return rows


def _call_codes(rows: pa.Table) -> tuple[npt.NDArray[np.int64], list[tuple[str, int] | None]]:
    """Number the distinct calls of a part; an attention core is keyed by the module around it."""
    modules, indices = rows["module"].to_pylist(), rows["call_index"].to_pylist()
    parts, parents = rows["part"].to_pylist(), rows["parent"].to_pylist()
    row_of_span = {span: number for number, span in enumerate(rows["span"].to_pylist())}
    codes: list[int] = []
    numbering: dict[tuple[str, int] | None, int] = {}
    keys: list[tuple[str, int] | None] = []
    for module, index, part, parent in zip(modules, indices, parts, parents, strict=True):
        key: tuple[str, int] | None = (module, index) if module is not None and not schema.is_aside(part) else None
        if key is None and part == "attention_core" and parent in row_of_span:
            outer = row_of_span[parent]
            key = (modules[outer] + CORE, indices[outer])
        if key not in numbering:
            numbering[key] = len(keys)
            keys.append(key)
        codes.append(numbering[key])
    return np.array(codes, dtype=np.int64), keys


def set_column(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Replace a column, keeping its declared type."""
    index = rows.schema.get_field_index(name)
    return rows.set_column(index, rows.schema.field(index), values)


def _known(value: np.int64) -> int | None:
    return None if value == UNKNOWN else int(value)


def _total(traffic: tuple[tuple[int | None, ...], ...] | None, position: int) -> int | None:
    if traffic is None:
        return None
    values = [layer[position] for layer in traffic]
    return None if None in values else sum(value for value in values if value is not None)
