"""The state of a KV cache at a step, kept small: one full reading, and how far all layers have grown since.

Reading every layer in full after every step would cost more than all marks together. The usual
cache grows by the same number of positions in every layer, so a reading is remembered and only
lengths are looked at until something else changes.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import kvcache
from .kvcache import LayerKV

_families: dict[tuple[LayerKV, ...], tuple[LayerKV, ...]] = {}


@dataclass(frozen=True, eq=False)
class KVLayout:
    """One full reading of a cache: the same one is the same object."""

    layers: tuple[LayerKV, ...]

    @cached_property
    def family(self) -> tuple[LayerKV, ...]:
        """The layers without lengths: the same object for all caches of the same make.

        A recurrent state keeps its bytes, which belong to its make: what grows is no such state.
        """
        bare = tuple(
            layer._replace(
                length=0,
                logical_bytes=layer.logical_bytes if layer.kind == "state" else 0,
                allocated_bytes=0,
            )
            for layer in self.layers
        )
        known = bare if any(layer.kind != "empty" for layer in bare) else ()
        return _families.setdefault(known, known)

    @cached_property
    def grows_evenly(self) -> bool:
        """Whether every layer grows by concatenation and held as many positions as the others."""
        lengths = {layer.length for layer in self.layers}
        full = all(layer.kind == "full" and layer.capacity is None for layer in self.layers)
        return full and len(lengths) == 1 and 0 not in lengths

    @cached_property
    def position_bytes(self) -> tuple[int, ...]:
        """Bytes of one position in each layer, of a layout that grows evenly."""
        return tuple(layer.logical_bytes // layer.length for layer in self.layers)

    @cached_property
    def totals(self) -> tuple[int, int]:
        """Logical and allocated bytes of all layers."""
        return sum(kv.logical_bytes for kv in self.layers), sum(kv.allocated_bytes for kv in self.layers)


@dataclass(frozen=True, slots=True)
class KVState:
    """A layout, and by how many positions every layer has grown since it was read."""

    layout: KVLayout
    grown: int = 0

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        """Every layer as it is now."""
        if not self.grown:
            return self.layout.layers
        return tuple(
            layer._replace(
                length=layer.length + self.grown,
                logical_bytes=layer.logical_bytes + self.grown * size,
                allocated_bytes=layer.logical_bytes + self.grown * size,
            )
            for layer, size in zip(self.layout.layers, self.layout.position_bytes, strict=True)
        )

    @property
    def logical_bytes(self) -> int:
        """Of the positions filled, in all layers."""
        logical = self.layout.totals[0]
        return logical + self.grown * sum(self.layout.position_bytes) if self.grown else logical

    @property
    def allocated_bytes(self) -> int:
        """Of the storage held; a layer that was just concatenated holds what it needs and no more."""
        return self.logical_bytes if self.grown else self.layout.totals[1]


NOTHING = KVState(KVLayout(()))


class CacheWatch:
    """Follows the cache of one call from step to step."""

    def __init__(self) -> None:
        self._cache: weakref.ref[Any] | None = None
        self._state = NOTHING
        self._row_shape: tuple[int, ...] = ()

    def before(self, cache: Any) -> tuple[KVState, int | None]:
        """The state before a step and the positions seen: as after the step before, unless something was done.

        What a program does to a cache between two steps it does to all layers: the first one tells.
        """
        if cache is not None and self._is_watched(cache):
            length = self._length_of(cache.layers[0])
            if length == self._state.layout.layers[0].length + self._state.grown:
                return self._state, length
        return self._look(cache, None)

    def after(self, cache: Any, expected: int | None) -> tuple[KVState, int | None]:
        """The state after a step and the positions seen; `expected` is what only a device could tell."""
        return self._look(cache, expected)

    def _look(self, cache: Any, expected: int | None) -> tuple[KVState, int | None]:
        if cache is None:
            return NOTHING, 0
        length = self._even_length(cache)
        read_at = self._state.layout.layers[0].length if length is not None else 0
        if length is None or length < read_at:
            return self._read(cache, expected)
        if length != read_at + self._state.grown:
            self._state = KVState(self._state.layout, length - read_at)
        return self._state, length

    def _even_length(self, cache: Any) -> int | None:
        """The one length of all layers; None for another cache, or when more than lengths has changed.

        Three layers are looked at, for to reach each of them costs more than all else here: the ends, and one
        between them that changes with the length. A layer that no longer grows is seen within as many steps as
        there are layers.
        """
        if not self._is_watched(cache):
            return None
        layers: Sequence[Any] = cache.layers
        length = self._length_of(layers[0])
        if length is None or self._length_of(layers[-1]) != length:
            return None
        another = layers[length % len(layers)].keys
        return length if another is not None and another.size(-2) == length else None

    def _is_watched(self, cache: Any) -> bool:
        """Whether it is the cache that was read, of which lengths tell all."""
        if self._cache is None or self._cache() is not cache or not self._state.layout.grows_evenly:
            return False
        # none in two caches in one, or in a cache of another library
        return len(getattr(cache, "layers", ())) == len(self._state.layout.layers)

    def _length_of(self, layer: Any) -> int | None:
        """Positions of a layer whose keys are as they were but for their number."""
        if layer.keys is None:
            return None
        *rows, length, width = layer.keys.shape
        return length if (*rows, width) == self._row_shape else None

    def _read(self, cache: Any, expected: int | None) -> tuple[KVState, int | None]:
        seen = kvcache.positions(cache)
        seen = expected if seen is None else seen
        self._state = KVState(KVLayout(kvcache.read(cache, seen)))
        try:
            self._cache = weakref.ref(cache)
        except TypeError:  # a plain tuple of tensors cannot be referred to, and is another one each step
            self._cache = None
        keys = getattr(next(iter(getattr(cache, "layers", None) or ()), None), "keys", None)
        shape = tuple(getattr(keys, "shape", ()))
        self._row_shape = (*shape[:-2], shape[-1]) if len(shape) > 2 else ()
        return self._state, seen
