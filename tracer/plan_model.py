"""A model without weights: built on the meta device, it tells its parameters, and runs forwards of any shape.

Nothing is loaded and nothing is computed: dimensions come from the real modules, KV from the real
cache, transient tensors from the real forward, FLOPs from the same replay that completes a trace.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from lifetrace.analysis.memory_plan import CacheGroup, Footprint, Matrices, Moment, Sizes
from lifetrace.analysis.time_plan import StepWork
from lifetrace.errors import ModelError, UsageError
from lifetrace.hooks.counting import CallCount, ForwardCount
from lifetrace.hooks.inventory import ModuleRow, inventory, parameter_count
from lifetrace.hooks.kvcache import LayerKV, cache_layers, cache_tensors, read
from lifetrace.hooks.live_bytes import KV, MADE, LiveBytes, LiveTensor
from lifetrace.hooks.recorder import Signature
from lifetrace.hooks.replay import Replayer, ReplayError, Runner
from lifetrace.hooks.stages import Lifecycle, find

from .counts import Family, Interpolation, kv_traffic, work_table
from .workload import first_line

KINDS = ("embedding", "attention", "mlp", "experts", "router", "norm", "lm_head", "other")
DIMENSIONS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
              "vocab_size", "head_dim")  # fmt: skip
MOST_LAYERS = 2_000
MOST = 10**9
# Lengths from which a recurrence, which runs position by position, is carried on: its work, and its live bytes,
# whose peak lies elsewhere in shorter ones.
FEW, LONGER = (12, 16, 20, 24), (20, 24, 28, 32)


@dataclass(frozen=True)
class ForwardMemory:
    """Live bytes of one forward: what the cache holds after it, and what else is live at the peak."""

    kv_bytes: int
    transient_bytes: int
    replicated_bytes: int
    module: str | None
    tensors: tuple[LiveTensor, ...]


class PlannedModel:
    """A model on the meta device with its lifecycle, measured by running it there.

    Args:
        config: of a causal language model.
        dtype: of its weights and activations.
        attention: `eager`, `sdpa` or null for the model's own choice.
        name: for messages.

    Raises:
        ModelError: no model can be built from the config.
        UsageError: its dimensions cannot be.
    """

    def __init__(self, config: Any, dtype: torch.dtype, attention: str | None, name: str) -> None:
        check_dimensions(config, name)
        self.name = name
        self.model = _build(config, dtype, attention, name)
        self.lifecycle = find(self.model)
        self.rows = inventory(self.model, self.lifecycle)
        self.parameters = parameter_count(self.rows)
        self.runner = Runner(self.model)
        self.replayer = Replayer(self.model)
        self._groups: dict[int, tuple[CacheGroup, ...]] = {}
        self.forward_memory = lru_cache(maxsize=None)(self._forward_memory)
        self._filled = lru_cache(maxsize=None)(self._fill)
        self.work = lru_cache(maxsize=None)(self._work)

    @property
    def text_config(self) -> Any:
        """The config of the language model."""
        return self.model.config.get_text_config(decoder=True)

    # -- parameters ----------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Parameters by kind of module, tied ones once; kinds without any are left out."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            if row.tied_to is None:
                counts[_kind(row, self.lifecycle)] += row.parameters
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    @property
    def tied_head(self) -> bool:
        """Whether the head is the embedding's matrix."""
        return any(row.tied_to is not None and row.place.stage == "lm_head" for row in self.rows)

    @cached_property
    def block_matrices(self) -> dict[str, int]:
        """Parameters in matrices of the layers by attention and mlp (experts and routers included)."""
        counts: Counter[str] = Counter()
        for row, module in self._layer_rows():
            kind = _kind(row, self.lifecycle)
            side = "mlp" if kind in ("mlp", "experts", "router") else kind
            counts[side] += sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        return {kind: counts[kind] for kind in ("attention", "mlp") if counts[kind]}

    @cached_property
    def packable(self) -> tuple[Matrices, ...]:
        """The matrices of the layers that quantized formats pack: of linear modules and stacked experts."""
        found: Counter[tuple[int, int]] = Counter()
        for row, module in self._layer_rows():
            if _kind(row, self.lifecycle) == "router" or isinstance(module, nn.modules.conv._ConvNd | nn.Embedding):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if (parameter.dim() == 2 and name == "weight") or parameter.dim() == 3:
                    rows, columns = parameter.shape[-2:]
                    transposed = type(module).__name__ == "Conv1D"  # GPT-2 keeps [inputs, outputs]
                    found[(columns, rows) if transposed else (rows, columns)] += math.prod(parameter.shape[:-2])
        return tuple(Matrices(count, *shape) for shape, count in found.items())

    @cached_property
    def expert_matrices(self) -> tuple[Matrices, ...]:
        """Those of the packable matrices that are experts'."""
        found: Counter[tuple[int, int]] = Counter()
        for row, module in self._layer_rows():
            if _kind(row, self.lifecycle) == "experts":
                for stack in _stacks(module):
                    found[(stack.shape[-2], stack.shape[-1])] += math.prod(stack.shape[:-2])
        return tuple(Matrices(count, *shape) for shape, count in found.items())

    def _layer_rows(self) -> list[tuple[ModuleRow, nn.Module]]:
        modules = dict(self.model.named_modules())
        return [(r, modules[r.module]) for r in self.rows if r.tied_to is None and r.place.stage == "layer"]

    @cached_property
    def heads(self) -> int | None:
        """Attention heads; null where it has none."""
        heads = getattr(self.text_config, "num_attention_heads", None)
        return heads if isinstance(heads, int) and any(g.kind != "state" for g in self.cache_groups(4)) else None

    def sizes(self) -> Sizes:
        """What decides how it is divided over devices."""
        vectors = self.kinds.get("norm", 0) + self.kinds.get("router", 0)
        for _, module in self._layer_rows():
            vectors += sum(p.numel() for n, p in module.named_parameters(recurse=False) if n == "bias")
        in_layers = sum(row.parameters for row, _ in self._layer_rows())
        ends = max(self.kinds.get("embedding", 0), self.kinds.get("lm_head", 0))
        return Sizes(
            split_share=1 - vectors / self.parameters,
            heads=self.heads,
            kv_groups=self.cache_groups(4),
            layers=len(self.lifecycle.layers),
            layer_share=in_layers / self.parameters,
            ends_share=ends / self.parameters,
        )

    # -- cache ---------------------------------------------------------------------------------

    def cache_groups(self, length: int) -> tuple[CacheGroup, ...]:
        """Equal layers of the cache that a prefill of one sequence makes, in order of their first layer.

        A layer that holds fewer positions than it has seen is a window, with room for as many. What a
        longer prefill showed holds for shorter ones.
        """
        if length in self._groups or length < max(self._groups, default=0):
            return self._groups[max(self._groups)]
        if length > FEW[-1] and self.sequential:
            return self.cache_groups(FEW[-1])
        self._groups[length] = self._groups_at(length)
        return self._groups[length]

    def _groups_at(self, length: int) -> tuple[CacheGroup, ...]:
        cache = self._filled(1, length)
        groups: Counter[tuple[Any, ...]] = Counter()
        for kv, tensors in zip(read(cache), cache_layers(cache), strict=False):
            if tensors:
                groups[_group_key(kv, tensors, length)] += 1
        return tuple(
            CacheGroup(kind, count, shapes, position, state, heads, capacity, item)
            for (kind, shapes, position, state, heads, capacity, item), count in groups.items()
        )

    @cached_property
    def sequential(self) -> bool:
        """Whether positions run one by one, as recurrences do without their kernels: more need more operators."""
        if not any(group.state_numbers for group in self.cache_groups(4)):
            return False
        few, more = (self._live(self._signature(1, n, ()), 0)[0].operators for n in (FEW[0], FEW[-1]))
        return more > 1.2 * few

    # -- forwards ------------------------------------------------------------------------------

    def prefill_memory(self, batch: int, length: int) -> ForwardMemory:
        """Live bytes of the prefill of so many tokens."""
        return self._memory(batch, lambda few, n: self.forward_memory(few, n, 0), length)

    def decode_memory(self, batch: int, context: int) -> ForwardMemory:
        """Live bytes of the decode step after which the cache has seen `context` positions."""
        return self._memory(batch, lambda few, n: self.forward_memory(few, 1, n - 1), context)

    def prefill_work(self, batch: int, length: int) -> StepWork:
        """Work of the prefill of so many tokens."""
        return self._carried_on(lambda n: self.work(batch, n, 0), length)

    def decode_work(self, batch: int, context: int) -> StepWork:
        """Work of the decode step after which the cache has seen `context` positions."""
        return self._carried_on(lambda n: self.work(batch, 1, n - 1), context)

    def decode_flops(self, batch: int, contexts: range) -> list[tuple[int | None, int | None]]:
        """FLOPs and dense FLOPs of each decode step by the positions in the cache after it, from few replays."""
        if not contexts:
            return []
        if self.sequential:
            rows = [self.decode_work(batch, context) for context in (contexts[0], contexts[-1])]
            return [_on_line(rows[0], rows[1], contexts, context) for context in contexts]
        signature, _ = self._decode_signature(batch, 1, contexts[0] - 1)
        family = Family(signature, lengths=[contexts[0] - 1, contexts[-1] - 1])
        found = Interpolation(self.replayer, self.lifecycle, family)
        rows_of = (found.at(context - 1).step for context in contexts)
        return [tuple(int(n) if n >= 0 else None for n in step[1:3]) for step in rows_of]  # type: ignore[misc]

    def footprint(self, batch: int, prompt: int, context: int) -> Footprint:
        """The moments of `generate()` that may be its highest; token choice is greedy."""
        prefill, decode = self.prefill_memory(batch, prompt), self.decode_memory(batch, context)
        logits = batch * self.vocabulary * self.item_bytes
        copy = batch * self.vocabulary * 4
        return Footprint(
            (
                Moment("the prefill", prefill.kv_bytes, prefill.transient_bytes, 0, prefill.replicated_bytes),
                Moment("the choice of the first token", prefill.kv_bytes, 0, logits + copy),
                Moment("the last decode step", decode.kv_bytes, decode.transient_bytes, copy, decode.replicated_bytes),
                Moment("the choice of the last token", decode.kv_bytes, 0, logits + 2 * copy),
            )
        )

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        head = dict(self.model.named_modules()).get(self.lifecycle.head or "")
        width = getattr(head, "out_features", None)
        return width if isinstance(width, int) else int(self.text_config.vocab_size)

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of its dtype."""
        return int(self.model.dtype.itemsize)

    def _signature(self, batch: int, q_len: int, kv: tuple[LayerKV, ...]) -> Signature:
        return Signature(
            batch=batch,
            q_len=q_len,
            kv=kv,
            cache_class=None,
            kv_len_before=None,
            head_positions=1,
            masked=False,
            embeds=False,
            use_cache=True,
        )

    def _decode_signature(self, batch: int, q_len: int, before: int) -> tuple[Signature, int]:
        """The signature of a step with so many positions cached; states alone hold none."""
        if not before:
            return self._signature(batch, q_len, ()), 0
        kv = read(self._filled(batch, min(before, 4)))
        states_alone = all(layer.kind == "state" for layer in kv)
        return self._signature(batch, q_len, kv), 0 if states_alone else before

    def _fill(self, batch: int, length: int) -> Any:
        return self._live(self._signature(batch, length, ()), 0)[1]

    def _live(self, signature: Signature, filled: int) -> tuple[LiveBytes, Any]:
        reason: Exception | None = None
        for masked in (False, True):  # some models look into a mask, others miss it
            try:
                return self.runner.live(signature, filled, masked)
            except Exception as error:  # noqa: BLE001 - any model code may run here; the reason is reported
                reason = reason or error
        assert reason is not None
        words = f"{type(reason).__name__}: {first_line(reason)}"
        raise ModelError(f"{self.name} cannot be run without its weights: {words}.")

    def _forward_memory(self, batch: int, q_len: int, before: int) -> ForwardMemory:
        live, cache = self._live(*self._decode_signature(batch, q_len, before))
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in cache_tensors(cache)}
        kv = sum(storages.values())
        peak, width = live.peak, getattr(self.text_config, "hidden_size", None)
        beside = tuple(t for t in peak.tensors if t.role in (MADE, KV))
        stream = sum(t.bytes_ for t in beside if t.role == MADE and t.shape and t.shape[-1] == width)
        transient = peak.bytes_ - live.initial_bytes - kv
        return ForwardMemory(kv, transient, min(stream, max(transient, 0)), peak.module, _made(live))

    def _work(self, batch: int, q_len: int, before: int) -> StepWork:
        signature, filled = self._decode_signature(batch, q_len, before)
        try:
            count = self.replayer.count(signature, filled)
        except ReplayError as error:
            raise ModelError(f"{self.name} cannot be counted without its weights: {error}.") from None
        weights, flops, dense, activations, _ = (int(n) for n in work_table(count, self.lifecycle).step)
        groups = self.cache_groups(before + q_len)
        held, after = self._kv_rows(groups, batch, before), self._kv_rows(groups, batch, before + q_len)
        traffic = kv_traffic(held, after, q_len)
        experts = self._experts(count, batch * q_len)
        return StepWork(
            tokens=batch * q_len,
            flops=flops if flops >= 0 else None,
            flops_dense=dense if dense >= 0 else None,
            head_flops=self._head_flops(count),
            read_weight_bytes=weights - experts[3],
            activation_bytes=activations,
            kv_read_bytes=_sum(layer[0] for layer in traffic),
            kv_write_bytes=_sum(layer[1] for layer in traffic),
            expert_bytes=experts[0],
            experts=experts[1],
            chosen=experts[2],
        )

    def _kv_rows(self, groups: tuple[CacheGroup, ...], batch: int, length: int) -> tuple[LayerKV, ...]:
        """The layers of the cache after so many positions, by the groups."""
        if not length:
            return ()
        rows = []
        for group in groups:
            held = length if group.capacity is None else min(length, group.capacity)
            bytes_ = group.bytes_at(batch, length) // group.layers
            rows += [LayerKV(group.kind, held, bytes_, bytes_, None, None)] * group.layers
        return tuple(rows)

    def _head_flops(self, count: ForwardCount) -> int:
        calls = (call for call in count.root.walk() if call.module == self.lifecycle.head)
        return sum(product.flops for call in calls for product in call.products())

    def _experts(self, count: ForwardCount, tokens: int) -> tuple[int, int, int, int]:
        """Bytes of one expert of each stack together, experts, how many a token takes, bytes counted for them."""
        modules = dict(self.model.named_modules())
        one = experts = chosen = counted = 0
        for call in count.root.walk():
            stacked = _stacks(modules.get(call.module))
            if not stacked or not any(p.flops_dense for p in call.own):
                continue
            one += sum(p.nbytes // p.shape[0] for p in stacked)
            experts = max(experts, stacked[0].shape[0])
            chosen = max(chosen, _pairs(call) // max(1, tokens))
            counted += sum(size for size in call.weights.values() if size is not None)
        return one, experts, chosen, counted

    def _memory(self, batch: int, measure: Callable[[int, int], ForwardMemory], length: int) -> ForwardMemory:
        """Live bytes of a batch; what runs position by position is followed for two sequences and carried on."""
        if batch <= 2 or not self.sequential:
            return self._carried_on(lambda n: measure(batch, n), length, LONGER)
        one, two = (self._carried_on(lambda n, few=few: measure(few, n), length, LONGER) for few in (1, 2))  # type: ignore[misc]
        return replace(
            two,
            **{
                name: getattr(one, name) + (batch - 1) * (getattr(two, name) - getattr(one, name))
                for name in ("kv_bytes", "transient_bytes", "replicated_bytes")
            },
        )

    def _carried_on(self, measure: Callable[[int], Any], length: int, few: tuple[int, ...] = FEW) -> Any:
        """Measure at a length; where positions run one by one carry a polynomial of short lengths on to it."""
        if not self.sequential or length <= few[-1]:
            return measure(length)
        found = [measure(n) for n in few]
        values = {name: [getattr(row, name) for row in found] for name in found[0].__dataclass_fields__}
        carried = {name: _polynomial(few, row, length, name) for name, row in values.items()}
        return type(found[-1])(**carried)


def check_dimensions(config: Any, name: str) -> None:
    """Refuse dimensions that no model can have, before anything is built.

    Raises:
        UsageError: zero, negative or absurdly large sizes, heads that do not divide.
    """
    text = config.get_text_config(decoder=True)
    for attribute in DIMENSIONS:
        value = _attribute(text, attribute)
        if isinstance(value, int) and not isinstance(value, bool) and not 0 < value <= MOST:
            raise UsageError(f"{name}: {attribute} is {value:,}; it has to be between 1 and {MOST:,}.")
    layers, heads = _attribute(text, "num_hidden_layers"), _attribute(text, "num_attention_heads")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UsageError(f"{name}: {layers:,} layers are more than lifetrace builds; give {MOST_LAYERS:,} at most.")
    given = _attribute(text, "head_dim")
    own = any(_attribute(text, other) for other in ("qk_nope_head_dim", "kv_channels", "attention_head_size"))
    width = _attribute(text, "hidden_size")
    if own or (isinstance(given, int) and isinstance(width, int) and heads and given != width // heads):
        width = None  # heads have a width of their own
    check_heads(name, width, heads, _attribute(text, "num_key_value_heads"))


def _attribute(config: Any, name: str) -> Any:
    """A config's attribute; null where it has none, or one for each layer, which it refuses to give as one."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - configs raise errors of their own making here
        return None


def check_heads(name: str, width: Any, heads: Any, kv_heads: Any) -> None:
    """Refuse heads that do not divide the width, or KV heads that do not divide the heads; null is not checked.

    Raises:
        UsageError: they do not; with the nearest number that does.
    """
    if not isinstance(heads, int):
        return
    if isinstance(width, int) and width % heads:
        near = _nearest_divisor(width, heads)
        raise UsageError(
            f"{name}: a width of {width:,} does not divide by {heads:,} heads; give {near:,} heads, or a head width."
        )
    if isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        near = _nearest_divisor(heads, kv_heads)
        raise UsageError(
            f"{name}: {heads:,} heads do not divide by {kv_heads:,} KV heads; give {near:,} KV heads, for instance."
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, min(number, 4096) + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def _build(config: Any, dtype: torch.dtype, attention: str | None, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **options).eval()
    except Exception as error:  # noqa: BLE001 - a config may describe anything
        raise ModelError(f"No model can be built from the config of {name}: {first_line(error)}.") from None
    with suppress(Exception):  # a config that insists on one keeps it
        model.config.pad_token_id = None  # some models look for it among tokens that have no values here
    return model


def _kind(row: ModuleRow, lifecycle: Lifecycle) -> str:
    """Embedding, attention, mlp, experts, router, norm, head or other: the nearest part around the module."""
    stage, part = row.place.stage, row.place.part
    if stage == "final_norm" or part == "norm":
        return "norm"
    if stage != "layer":
        return {"embed": "embedding", "lm_head": "lm_head"}.get(stage, "other")
    name = row.module
    while part is None and name:
        name = name.rpartition(".")[0]
        part = lifecycle.places[name].part if name in lifecycle.places else None
    return part if part in KINDS else "other"


def _group_key(kv: LayerKV, tensors: Sequence[torch.Tensor], seen: int) -> tuple[Any, ...]:
    """What equal layers share: of each tensor its shape without the length, and what a position takes."""
    growing = [t for t in tensors if t.dim() == 4 and kv.length and t.shape[-2] == kv.length and kv.kind != "state"]
    numbers = sum(t.numel() // kv.length for t in growing)
    state = sum(t.numel() for t in tensors) - sum(t.numel() for t in growing)
    shapes = tuple((t.shape[0], t.shape[1], 0, t.shape[3]) for t in growing)
    heads = growing[0].shape[1] if growing else None
    capacity = kv.length if growing and kv.length < seen else kv.capacity
    return kv.kind, shapes, numbers, state, heads, capacity, tensors[0].element_size()


def _stacks(module: nn.Module | None) -> list[torch.Tensor]:
    """Stacked weights [experts, …] of a module itself."""
    if module is None or isinstance(module, nn.modules.conv._ConvNd):
        return []
    return [p for p in module.parameters(recurse=False) if p.dim() > 2]


def _pairs(call: CallCount) -> int:
    """Token–expert pairs of an experts call: the rows of its products."""
    return max((product.batch for product in call.own), default=0)


def _made(live: LiveBytes) -> tuple[LiveTensor, ...]:
    return tuple(tensor for tensor in live.peak.tensors if tensor.role == MADE)


def _on_line(first: StepWork, last: StepWork, contexts: range, at: int) -> tuple[int | None, int | None]:
    """FLOPs and dense FLOPs between two steps, on a straight line."""
    span = max(1, contexts[-1] - contexts[0])
    pairs = ((first.flops, last.flops), (first.flops_dense, last.flops_dense))
    return tuple(  # type: ignore[return-value]
        a + (b - a) * (at - contexts[0]) // span if a is not None and b is not None else None for a, b in pairs
    )


def _sum(values: Any) -> int | None:
    listed = list(values)
    return None if None in listed else sum(listed)


def _polynomial(points: Sequence[int], values: Sequence[Any], at: int, name: str) -> Any:
    """The parabola through the first three points, at another one; the fourth has to lie on it.

    Raises:
        ModelError: it does not.
    """
    if not all(isinstance(value, int) for value in values):
        return values[-1]
    parabola = [_lagrange(points[:3], values[:3], n) for n in (points[3], at)]
    if abs(parabola[0] - values[3]) > 0.001 * abs(values[3]):
        raise ModelError(
            f"{name} does not follow the length of the sequence, so it cannot be planned for {at:,} tokens."
        )
    return parabola[1]


def _lagrange(xs: Sequence[int], ys: Sequence[int], at: int) -> int:
    total = 0.0
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        factors = [(at - other) / (x - other) for j, other in enumerate(xs) if j != i]
        total += y * math.prod(factors)
    return round(total)
