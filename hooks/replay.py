"""Replays a step's shapes on a meta copy of the model, after the run, to count its work.

The copy holds no memory: every parameter and buffer is an empty meta tensor. It runs with eager
attention and batched experts, whose operators show all products; the counts do not depend on
which implementation the run used. Each distinct signature is replayed once, and decode steps
that differ only in the length of their cache are counted at the ends of a range: the counts
are affine between, which a step in the middle verifies, or the range is halved.
"""

import copy
from typing import Any

import torch
from torch import nn

from .attach import on_calls
from .counting import CallCount, CallTree, CountingMode, ForwardCount, causal_pairs, storage_id
from .kvcache import CACHE_ARGUMENTS, find_cache
from .recorder import Signature

EAGER, BATCHED = "eager", "batched_mm"


class ReplayError(Exception):
    """A signature that the meta copy cannot replay; the message says why."""


class Replayer:
    """Replays signatures on a meta copy of one model.

    Raises:
        ReplayError: when the model cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        try:
            self.model = meta_copy(model)
        except Exception as error:  # noqa: BLE001 - a model may refuse to be copied in any way
            raise ReplayError(f"the model cannot be copied: {type(error).__name__}: {error}") from error
        self.names = {module: name for name, module in self.model.named_modules()}
        self.modules = dict(self.model.named_modules())
        self.weights = {storage_id(p): p.nbytes for p in self.model.parameters()}

    def count(self, signature: Signature, kv_len_before: int) -> ForwardCount:
        """Count the forward of a signature with so many positions in its cache.

        Raises:
            ReplayError: when the meta copy cannot run it.
        """
        reasons = []
        for masked in (False, True):  # some models look into a mask, others miss it
            try:
                return self._count(signature, kv_len_before, masked)
            except Exception as error:  # noqa: BLE001 - any model code may run here; the reason is reported
                reasons.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise ReplayError(reasons[0])

    @torch.no_grad()
    def _count(self, signature: Signature, kv_len_before: int, masked: bool) -> ForwardCount:
        cache = self._cache(signature, kv_len_before, masked)
        inputs = self._inputs(signature, signature.q_len) | {"logits_to_keep": signature.head_positions}
        if masked:
            inputs["attention_mask"] = self._mask(signature, kv_len_before + signature.q_len)
        return self._forward(inputs, signature, cache, kv_len_before)

    def _mask(self, signature: Signature, length: int) -> torch.Tensor:
        return torch.ones(signature.batch, length, dtype=torch.long, device="meta")

    def _inputs(self, signature: Signature, q_len: int) -> dict[str, Any]:
        if signature.embeds:
            width = self.model.get_input_embeddings().embedding_dim
            embeds = torch.empty(signature.batch, q_len, width, dtype=self.model.dtype, device="meta")
            return {"inputs_embeds": embeds}
        return {"input_ids": torch.empty(signature.batch, q_len, dtype=torch.long, device="meta")}

    def _cache(self, signature: Signature, kv_len_before: int, masked: bool) -> Any:
        """Make the cache by replaying what filled it, uncounted."""
        if not signature.use_cache:
            return None
        cache = self._empty_cache(signature)
        if kv_len_before == 0:
            return cache
        filling = self._inputs(signature, kv_len_before)
        if masked:
            filling["attention_mask"] = self._mask(signature, kv_len_before)
        output = self._call(filling | {"logits_to_keep": 1}, cache, use_cache=True)
        filled = find_cache(output)
        return filled if filled is not None else cache

    def _empty_cache(self, signature: Signature) -> Any:
        capacity = max((kv.capacity for kv in signature.kv if kv.capacity is not None), default=None)
        if capacity is None:
            return None
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=capacity)

    def _call(self, inputs: dict[str, Any], cache: Any, use_cache: bool) -> Any:
        accepted = forward_parameters(self.model)
        if cache is not None:
            name = next((n for n in CACHE_ARGUMENTS if n in accepted), CACHE_ARGUMENTS[0])
            inputs = inputs | {name: cache}
        if "logits_to_keep" not in accepted:
            inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
        return self.model(**inputs, use_cache=use_cache, return_dict=True)

    def _forward(self, inputs: dict[str, Any], signature: Signature, cache: Any, before: int) -> ForwardCount:
        root = CallCount("", 0)

        def visible_pairs(stack: list[CallCount], q_len: int, keys: int) -> int:
            return self._visible_pairs(stack, q_len, keys, before, signature.q_len)

        mode = CountingMode(root, self.weights, visible_pairs)
        tree = CallTree(self.names, mode)
        with on_calls(self.model, tree.enter, tree.leave), mode:
            self._call(inputs, cache, signature.use_cache)
        return ForwardCount(root)

    def _visible_pairs(self, stack: list[CallCount], q_len: int, keys: int, before: int, step_q_len: int) -> int:
        """Pairs let through in the attention that is running; all of them where it is not causal self-attention."""
        module = self.modules[stack[-1].module]
        if q_len != step_q_len or keys < q_len or getattr(module, "is_causal", True) is False:
            return q_len * keys
        window = _window(module, self.model.config)
        chunk = getattr(module, "attention_chunk_size", None) if getattr(module, "use_rope", True) else None
        pairs = causal_pairs(q_len, before, window, chunk if isinstance(chunk, int) else None)
        return min(pairs, q_len * keys)


def _window(module: nn.Module, config: Any) -> int | None:
    """The sliding window of an attention module: its own, else the one its config gives to all layers."""
    if hasattr(module, "sliding_window"):
        window = module.sliding_window
    else:
        text = config.get_text_config(decoder=True)
        types = getattr(text, "layer_types", None)
        index = getattr(module, "layer_idx", None)
        sliding = types is None or (isinstance(index, int) and index < len(types) and "sliding" in types[index])
        window = getattr(text, "sliding_window", None) if sliding else None
        if getattr(text, "use_sliding_window", True) is False:
            window = None
    return window if isinstance(window, int) else None


def forward_parameters(model: nn.Module) -> set[str]:
    """Names that a model's forward takes."""
    import inspect

    return set(inspect.signature(model.forward).parameters)


def meta_copy(model: nn.Module) -> Any:
    """Copy a model without its weights: every tensor becomes an empty meta tensor, every hook is left out."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for value in own:
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _meta(value)
    clone = copy.deepcopy(model, memo)
    for module in clone.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_with_kwargs):
            hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
        module._forward_hooks_always_called.clear()
        vars(module).pop("forward", None)
        vars(module).pop("_hf_hook", None)
    clone.eval()
    _use_countable(clone)
    return clone


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty


def _use_countable(model: Any) -> None:
    """Choose the implementations whose operators show all products."""
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        for name, value in (("_attn_implementation", EAGER), ("_experts_implementation", BATCHED)):
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
