"""Reads a KV cache object after a step: any class, from its tensors' metadata, without waiting.

Nothing here touches the contents of a tensor, so nothing synchronises with a device. What a
static cache counts on the device is followed on the host instead (`positions_seen`).
"""

import itertools
from collections.abc import Iterable
from functools import cache as remember
from typing import Any, NamedTuple

import torch

# The names under which a forward takes and gives its cache, newest first.
CACHE_ARGUMENTS = (
    "cache", "past_key_values", "layer_past", "cache_params", "state", "mems", "past_buckets_states"
)  # fmt: skip


class LayerKV(NamedTuple):
    """The cache of one layer: positions held, bytes of those filled, bytes of storage.

    `capacity` is the number of slots of a preallocated layer, None where it grows.
    """

    kind: str
    length: int
    logical_bytes: int
    allocated_bytes: int
    dtype: str | None
    device: str | None
    capacity: int | None = None


def find_cache(arguments: dict[str, Any]) -> Any:
    """Return the cache among a forward's arguments or in its output, or None.

    Reads the dictionary itself: a model output warns when it is asked for a name of older days.
    """
    for name in CACHE_ARGUMENTS:
        cache = dict.get(arguments, name)
        if cache is not None:
            return cache
    return None


def read(cache: Any, positions_seen: int | None = None) -> tuple[LayerKV, ...]:
    """Read each layer of a cache, in the order of its slots.

    Args:
        cache: a transformers cache, a tuple of (key, value) pairs, or None.
        positions_seen: how many positions went in; what a static layer has filled.
    """
    if cache is None:
        return ()
    rows = [_read_layer(slot, positions_seen) for slot in _slots(getattr(cache, "self_attention_cache", cache))]
    # What layers keep of other positions than their own stands behind, where there is any.
    crossed = [_read_layer(slot, None) for slot in _slots(getattr(cache, "cross_attention_cache", ()))]
    return tuple(rows + [row._replace(kind="cross") for row in crossed if row.kind != "empty"])


def positions(cache: Any) -> int | None:
    """Return how many positions the cache has seen, or None where only the device knows.

    A cache of recurrent states alone holds no positions: 0.
    """
    if cache is None:
        return 0
    cache = getattr(cache, "self_attention_cache", cache)
    if not hasattr(cache, "layers") and hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        return length if isinstance(length, int) else None
    seen = 0
    for layer in getattr(cache, "layers", None) or _slots(cache):
        count = getattr(layer, "cumulative_length", None)
        if isinstance(count, int):
            seen = max(seen, count)
        elif isinstance(count, torch.Tensor):
            if count.device.type != "cpu":
                return None
            return int(count)
        elif isinstance(keys := getattr(layer, "keys", None), torch.Tensor) and keys.dim() > 1:
            return max(seen, keys.shape[-2])
        elif isinstance(layer, tuple) and len(layer) > 1 and isinstance(layer[0], torch.Tensor):
            seen = max(seen, _read_layer(layer, None).length)
    return seen


def cache_layers(cache: Any) -> list[tuple[torch.Tensor, ...]]:
    """The tensors that hold each layer's states, one entry a row of `read`'s own positions."""
    if cache is None:
        return []
    return [tuple(_tensors(slot)) for slot in _slots(getattr(cache, "self_attention_cache", cache))]


def cache_tensors(cache: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors that hold a cache's states, of all its layers."""
    yield from itertools.chain(*cache_layers(cache), *cache_layers(getattr(cache, "cross_attention_cache", None)))


def _slots(cache: Any) -> list[Any]:
    """The layers of a cache by slot, however it keeps them.

    Most have `layers`. Others keep lists, or dictionaries by number, with one entry a layer; some
    keep such lists beside `layers`, for the layers that hold no keys.
    """
    if isinstance(cache, tuple | list):
        return list(cache)
    layers = getattr(cache, "layers", None)
    if layers is not None and type(cache).__module__ == "transformers.cache_utils":
        return list(layers)  # the common case: nothing stands beside the layers
    beside = [_entries(value) for name, value in vars(cache).items() if name != "layers"]
    beside = [entries for entries in beside if _holds_tensors(entries)]
    if layers is None and not beside:
        return [cache]
    slots = list(layers or ())
    slots += [()] * (max(map(len, beside), default=0) - len(slots))
    return [_slot(layer, [e[number] for e in beside if number < len(e)]) for number, layer in enumerate(slots)]


def _slot(layer: Any, beside: list[Any]) -> Any:
    """The layer itself where it holds anything, else what the cache keeps for it beside."""
    states = States(entry for entry in beside if _holds_tensors(entry))
    return layer if _holds_tensors(layer) or not states else states


class States(list[Any]):
    """The states of one layer that its cache keeps in lists of its own."""


def _entries(value: Any) -> list[Any]:
    """A list, or a dictionary by layer number, as a list; anything else holds no layers."""
    if isinstance(value, dict) and all(isinstance(key, int) for key in value):
        return [value.get(number, ()) for number in range(max(value, default=-1) + 1)]
    return list(value) if isinstance(value, tuple | list) else []


def _read_layer(layer: Any, positions_seen: int | None) -> LayerKV:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if type(layer).__name__ == "DynamicLayer" and keys is not None:
        return _read_growing(keys, values)
    tensors = list(_tensors(layer))
    if not tensors:
        shared = getattr(layer, "is_initialized", not isinstance(layer, tuple | list))
        return LayerKV("shared" if shared else "empty", 0, 0, 0, None, None)
    if isinstance(layer, tuple) and len(tensors) > 1:
        keys, values = tensors[:2]
    allocated = _storage_bytes(tensors)
    held = keys.shape[-2] if isinstance(keys, torch.Tensor) and keys.dim() > 2 else 0
    capacity = getattr(layer, "max_cache_len", None)
    kind, length, logical = _kind(layer), held, sum(tensor.nbytes for tensor in tensors)
    if isinstance(capacity, int) and held:
        length = held if positions_seen is None else min(positions_seen, held)
        logical = logical // held * length
    elif kind == "quantized":
        length = getattr(layer, "cumulative_length", held)
    first = keys if isinstance(keys, torch.Tensor) and keys.numel() else tensors[0]
    return LayerKV(
        kind, length, logical, allocated, _dtype(first.dtype), _device(first.device), capacity if held else None
    )


def _read_growing(keys: torch.Tensor, values: torch.Tensor | None) -> LayerKV:
    """The common case, kept short: it runs for every layer after every step."""
    logical = keys.nbytes + (values.nbytes if values is not None else 0)
    allocated = keys.untyped_storage().nbytes() + (values.untyped_storage().nbytes() if values is not None else 0)
    length = keys.shape[-2] if keys.dim() > 1 else 0
    return LayerKV("full", length, logical, allocated, _dtype(keys.dtype), _device(keys.device))


def _kind(layer: Any) -> str:
    if isinstance(layer, States | torch.Tensor):
        return "state"
    if hasattr(layer, "_quantized_keys"):
        return "quantized"
    if getattr(layer, "recurrent_states", None) is not None or getattr(layer, "conv_states", None) is not None:
        return "state" if getattr(layer, "keys", None) is None else "hybrid"
    if getattr(layer, "is_sliding", False):
        return "sliding"
    return "static" if isinstance(getattr(layer, "max_cache_len", None), int) else "full"


def _tensors(layer: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of a cache layer that hold states, however it stores them; counters are not states."""
    if isinstance(layer, torch.Tensor):
        yield layer
        return
    values = layer if isinstance(layer, tuple | list | dict) else getattr(layer, "__dict__", {})
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            if value.dim() > 1:
                yield value
        elif isinstance(value, tuple | list | dict):
            yield from _tensors(value)


def _holds_tensors(layer: Any) -> bool:
    return next(iter(_tensors(layer)), None) is not None


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@remember
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@remember
def _device(device: torch.device) -> str:
    return str(device)
