"""Runs a step's shapes again after the run, on a meta copy of the model, to count its work.

The copy holds no memory: every parameter and buffer is an empty meta tensor. It runs with eager
attention and batched experts, whose operators show all products; the counts do not depend on
which implementation the run used. Where code looks into values, which meta tensors have not, the
real model runs the same shapes once more, untimed, with eager attention. Each distinct signature is replayed
once; decode steps that differ only in the length of their cache are counted at the ends of a
range (`tracer.counts`).
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, StaticCache

from .attach import HOOK_DICTS, compiled_regions, device_of, on_calls, without_hooks
from .counting import CallCount, CallTree, CountingMode, ForwardCount, causal_pairs, storage_id
from .inventory import is_shared_out, local_part
from .kvcache import CACHE_ARGUMENTS, LayerKV, find_cache, positions, read
from .live_bytes import LiveBytes
from .operators import OperatorMode
from .recorder import Signature

EAGER, BATCHED = "eager", "batched_mm"
MAX_REAL_RUNS = 24  # of the real model, for one trace: counting may not take longer than what it counts


class ReplayError(Exception):
    """A signature that cannot be replayed; the message says why."""


class Replayer:
    """Replays signatures of one model: on a meta copy, or on the model itself where that cannot be."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.real_runs = 0

    def count(self, signature: Signature, kv_len_before: int) -> ForwardCount:
        """Count the forward of a signature with so many positions in its cache.

        Raises:
            ReplayError: when neither the meta copy nor the model itself can run it.
        """
        reasons = []
        for run in (self._count_on_meta, self._count_really):
            for masked in (False, True):  # some models look into a mask, others miss it
                try:
                    return run(signature, kv_len_before, masked)
                except Exception as error:  # noqa: BLE001 - any model code may run here; the reason is reported
                    reasons.append(_reason(error))
        raise ReplayError(reasons[-1])

    @cached_property
    def _meta(self) -> "Runner":
        return Runner(meta_copy(self.model))

    @cached_property
    def _real(self) -> "Runner":
        return Runner(self.model)

    def operators(self, signature: Signature, kv_len_before: int) -> CallCount:
        """Run the forward of a signature on the model itself, and count the operators of each module call.

        Raises:
            ReplayError: when the model cannot run it, or runs compiled code, whose kernels are no operators.
        """
        if compiled_regions(self.model):
            raise ReplayError("compiled code launches kernels of its own, not operators")
        self._spend(1)
        reason = ""
        for masked in (signature.masked, not signature.masked):
            try:
                with without_hooks(self.model):
                    return self._real.operators(signature, kv_len_before, masked)
            except Exception as error:  # noqa: BLE001 - any model code may run here; the reason is reported
                reason = _reason(error)
        raise ReplayError(reason)

    def _spend(self, runs: int) -> None:
        if is_shared_out(self.model):
            raise ReplayError("the model is shared out to several processes, and none may run it alone")
        if self.real_runs >= MAX_REAL_RUNS:
            raise ReplayError(f"counting would run the model itself more than {MAX_REAL_RUNS} times")
        self.real_runs += runs

    def _count_on_meta(self, signature: Signature, kv_len_before: int, masked: bool) -> ForwardCount:
        return self._meta.count(signature, kv_len_before, masked)

    def _count_really(self, signature: Signature, kv_len_before: int, masked: bool) -> ForwardCount:
        """Run the model itself, with two sets of tokens: code that looks into values may count differently."""
        self._spend(2)
        with without_hooks(self.model), eager_attention(self.model):
            count, other = (self._real.count(signature, kv_len_before, masked, spread) for spread in (False, True))
        if count.flops_dense() != other.flops_dense():
            raise ReplayError("how much is computed depends on the tokens themselves")
        return count


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _tables(model: nn.Module) -> Iterator[str]:
    """Modules without parameters beside the layers: what they compute from positions are tables."""
    listed = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for name, module in model.named_modules():
        if next(module.parameters(), None) is None and not name.startswith(listed):
            yield name


class Runner:
    """Runs signatures on one model, real or of meta tensors, and counts them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.modules = dict(model.named_modules())
        self.weights = {storage_id(p): p.nbytes for p in model.parameters()}
        self.weightless = frozenset(_tables(model))
        self.device = torch.device(device_of(model) or "cpu")
        self.spread = False
        self.accepted = set(inspect.signature(model.forward).parameters)

    @torch.no_grad()
    def count(self, signature: Signature, kv_len_before: int, masked: bool, spread: bool = False) -> ForwardCount:
        """Count one forward, with a mask of ones or without one; random numbers are left as they were.

        Args:
            signature: what to run.
            kv_len_before: positions in the cache.
            masked: whether to give a mask.
            spread: give different tokens instead of one and the same.
        """
        self.spread = spread
        root = CallCount("", 0)

        def visible_pairs(stack: list[CallCount], q_len: int, keys: int) -> int:
            return self._visible_pairs(stack, q_len, keys, kv_len_before, signature.q_len)

        mode = CountingMode(root, self.weights, visible_pairs, self.weightless)
        self._run(signature, kv_len_before, masked, mode)
        return ForwardCount(root)

    @torch.no_grad()
    def operators(self, signature: Signature, kv_len_before: int, masked: bool) -> CallCount:
        """Count the operators of one forward; its other counts are left out."""
        self.spread = True
        root = CallCount("", 0)
        self._run(signature, kv_len_before, masked, OperatorMode(root))
        return root

    def _run(self, signature: Signature, kv_len_before: int, masked: bool, mode: CountingMode | OperatorMode) -> None:
        """Run one forward under a mode that books its operators; random numbers are left as they were."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            cache = self._cache(signature, kv_len_before, masked)
            inputs = self._inputs(signature, signature.q_len) | {"logits_to_keep": signature.head_positions}
            inputs |= {name: self._zeros(shape, dtype) for name, shape, dtype in signature.extras}
            if masked:
                inputs["attention_mask"] = self._mask(signature, kv_len_before + signature.q_len)
            tree = CallTree(self.names, mode)
            with on_calls(self.model, tree.enter, tree.leave), mode:
                self._call(inputs, cache, signature.use_cache)

    @torch.no_grad()
    def live(self, signature: Signature, kv_len_before: int, masked: bool = False) -> tuple[LiveBytes, Any]:
        """Follow the live bytes of one forward with the model's own attention; returns them and the cache after it.

        On meta tensors fused operators make their output alone, as their kernels do.
        """
        fused = FusedOperators() if self.device.type == "meta" else nullcontext()
        with fused:
            cache = self._cache(signature, kv_len_before, masked)
            inputs = self._inputs(signature, signature.q_len) | {"logits_to_keep": signature.head_positions}
            if masked:
                inputs["attention_mask"] = self._mask(signature, kv_len_before + signature.q_len)
            with LiveBytes(self.model) as live:
                output = self._call(inputs, cache, signature.use_cache)
        found = find_cache(output)
        return live, found if found is not None else cache

    def _mask(self, signature: Signature, length: int) -> torch.Tensor:
        return torch.ones(signature.batch, length, dtype=torch.long, device=self.device)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _inputs(self, signature: Signature, q_len: int) -> dict[str, Any]:
        """Inputs of the right shape; which ids they are should not matter."""
        shape = (signature.batch, q_len)
        if signature.embeds:
            width = self.model.get_input_embeddings().embedding_dim
            return {"inputs_embeds": self._zeros((*shape, width), self.model.dtype)}
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        ids = torch.ones(shape, dtype=torch.long, device=self.device)
        return {"input_ids": ids.cumsum(-1) % vocabulary if self.spread else ids}

    def _cache(self, signature: Signature, kv_len_before: int, masked: bool) -> Any:
        """Make the cache by running what fills it, uncounted."""
        recurrent = bool(signature.kv) and all(kv.kind == "state" for kv in signature.kv)
        if not signature.use_cache or (kv_len_before == 0 and not recurrent):
            return self._empty_cache(signature)
        filled = self._filled(signature, max(kv_len_before, 1), masked)
        surplus = (positions(filled) or 0) - kv_len_before
        if 0 < surplus < kv_len_before:  # the model puts positions of its own before the prompt
            filled = self._filled(signature, kv_len_before - surplus, masked)
        if positions(filled) not in (kv_len_before, None) or not _same_states(read(filled), signature.kv):
            raise ReplayError(f"its cache cannot be filled with {kv_len_before} positions")
        return filled

    def _filled(self, signature: Signature, length: int, masked: bool) -> Any:
        filling = self._inputs(signature, length)
        if masked:
            filling["attention_mask"] = self._mask(signature, length)
        cache = self._empty_cache(signature)
        output = self._call(filling | {"logits_to_keep": 1}, cache, use_cache=True)
        filled = find_cache(output)
        return filled if filled is not None else cache

    def _empty_cache(self, signature: Signature) -> Any:
        if not signature.use_cache:
            return None
        capacity = max((kv.capacity for kv in signature.kv if kv.capacity is not None), default=None)
        if capacity is not None:
            return StaticCache(config=self.model.config, max_cache_len=capacity)
        if signature.cache_class == DynamicCache.__name__:
            return DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return None  # the model makes one of its own kind

    def _call(self, inputs: dict[str, Any], cache: Any, use_cache: bool) -> Any:
        if cache is not None:
            name = next((n for n in CACHE_ARGUMENTS if n in self.accepted), CACHE_ARGUMENTS[0])
            inputs = inputs | {name: cache}
        if "logits_to_keep" not in self.accepted:
            inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
        return self.model(**inputs, use_cache=use_cache, return_dict=True)

    def _visible_pairs(self, stack: list[CallCount], q_len: int, keys: int, before: int, step_q_len: int) -> int:
        """Pairs let through in the attention that is running; all of them where it is not causal self-attention."""
        module = self.modules[stack[-1].module]
        causal = getattr(module, "is_causal", None)
        if keys < q_len or (causal is False and not getattr(module, "is_decoder", False)):
            return q_len * keys
        if q_len != step_q_len:  # over other positions than the step's, such as patches of bytes
            return causal_pairs(q_len, keys - q_len) if causal else q_len * keys
        window, chunk = reach(module, self.model.config)
        return min(causal_pairs(q_len, before, window, chunk), q_len * keys)


GROUPED_PRODUCTS = tuple(
    function
    for function in (getattr(nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)


class FusedOperators(TorchFunctionMode):
    """Stands in, on meta tensors, for fused operators that torch takes apart there or refuses in some dtypes.

    Each makes its output alone, as its kernels do: attention lays it out with the queries before
    the heads; grouped products of [rows, k] with [groups, k, n] give [rows, n].
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any other function; of these make the output."""
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            query, width = named["query"], named["value"].shape[-1]
            *batch, heads, q_len, _ = query.shape
            return query.new_empty((*batch, q_len, heads, width)).transpose(-2, -3)
        if func in GROUPED_PRODUCTS:
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        return func(*args, **kwargs)


def _same_states(filled: tuple[LayerKV, ...], noted: tuple[LayerKV, ...]) -> bool:
    """Whether the recurrent states of two caches are of one size; what grows is not a state but a memory."""
    states = [[kv.logical_bytes for kv in layers if kv.kind == "state"] for layers in (filled, noted)]
    return states[0] == states[1]


def reach(module: nn.Module, config: Any) -> tuple[int | None, int | None]:
    """The sliding window and the chunk that limit an attention module, None each where nothing does.

    What its config says of the layer decides; where it says nothing, a window of the module's own,
    else the one that the config gives to all layers.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None) or ()
    index = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    kind = kinds[index] if isinstance(index, int) and index < len(kinds) else ""
    window = chunk = None
    if "chunk" in kind:
        chunk = getattr(text, "attention_chunk_size", None)
    elif "full" not in kind and "global" not in kind and getattr(text, "use_sliding_window", True):
        of_all = getattr(text, "sliding_window", None) or getattr(text, "window_size", None)
        everywhere = not kinds or "sliding" in kind or "local" in kind
        window = getattr(module, "sliding_window", of_all if everywhere else None)
    if "sliding" not in kind and hasattr(module, "indexer"):  # it chooses this many keys for each query
        window = getattr(text, "index_topk", None)
    return (window if isinstance(window, int) else None, chunk if isinstance(chunk, int) else None)


def meta_copy(model: nn.Module) -> Any:
    """Copy a model without its weights: every tensor becomes an empty meta tensor, every hook is left out."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for value in own:
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _meta(value)
        hook = getattr(module, "_hf_hook", None)
        memo[id(hook)] = hook  # it holds the offloaded weights themselves, and is left out below
    clone = copy.deepcopy(model, memo)
    for module in clone.modules():
        for name in HOOK_DICTS:
            vars(module)[name].clear()
        vars(module).pop("forward", None)
        vars(module).pop("_hf_hook", None)
    clone.eval()
    _choose(clone, {"_attn_implementation": EAGER, "_experts_implementation": BATCHED})
    return clone


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(local_part(tensor).shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty


def _choose(model: Any, choices: dict[str, str]) -> list[tuple[Any, str, Any]]:
    """Choose implementations whose operators show all products; returns what each config had before."""
    before = []
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        for name, value in choices.items():
            if getattr(config, name, None) is not None:
                before.append((config, name, getattr(config, name)))
                setattr(config, name, value)
    return before


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Let a model run with eager attention, whose masks can be read, and put back what it had."""
    before = _choose(model, {"_attn_implementation": EAGER})
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)
