"""What was held at a run's highest moment, piece by piece, so that the pieces add up to it."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lifetrace.hooks.inventory import ModuleRow
from lifetrace.hooks.live_bytes import GIVEN, KV, WEIGHT, LiveBytes, LivePeak, LiveTensor
from lifetrace.hooks.stages import Lifecycle, Place

HELD_SHOWN = 16
SOURCE = "live tensor bytes, followed operator by operator in a pass of its own"


def peak_facts(live: LiveBytes, modules: list[ModuleRow], lifecycle: Lifecycle, config: Any) -> dict[str, Any]:
    """The manifest's `memory`: the highest moment with what made it, its pieces, and what was held after the run.

    `live` has followed a run that has ended; `config` is the text model's, whose sizes tell logits
    and attention scores from other tensors.
    """
    peak = live.peak
    place = place_of(peak.module, lifecycle) if peak.module is not None else Place("sample")
    return {
        "source": SOURCE,
        "peak_bytes": peak.bytes_,
        "step": peak.step,
        "module": peak.module,
        "stage": place.stage,
        "layer": place.layer,
        "part": place.part,
        "maker": _tensor(peak.maker),
        "pieces": composition(peak, modules, lifecycle, config),
        "held_after": [_tensor(tensor) for tensor in live.held[:HELD_SHOWN]],
        "held_after_bytes": sum(tensor.bytes_ for tensor in live.held),
    }


def composition(peak: LivePeak, modules: list[ModuleRow], lifecycle: Lifecycle, config: Any) -> list[dict[str, Any]]:
    """The pieces of a peak, largest first: rows of kind, stage, part and bytes that add up to it.

    Kinds: `weights` of each stage, tied ones once; `buffers` beside them; `kv`; `inputs` that the
    caller holds; `logits`, the copy that generation makes of them included; `scores` that eager
    attention writes; `activations` of each stage and part; `tokens`, the ids and flags of the loop.
    """
    pieces: Counter[tuple[str, str | None, str | None]] = Counter()
    for row in modules:
        if row.tied_to is None:
            pieces["weights", row.place.stage, None] += row.weight_bytes
    pieces["buffers", None, None] = peak.bytes_of(WEIGHT) - sum(pieces.values())
    sizes = _Sizes.of(config, peak)
    for tensor in peak.tensors:
        if tensor.role != WEIGHT:
            pieces[_kind(tensor, lifecycle, sizes)] += tensor.bytes_
    rows = [
        {"kind": kind, "stage": stage, "part": part, "bytes": size}
        for (kind, stage, part), size in pieces.items()
        if size
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


@dataclass(frozen=True)
class _Sizes:
    """Lengths of a tensor's last dimension that tell what it is: the vocabulary, and keys of attention."""

    vocabulary: int | None
    keys: frozenset[int]

    @classmethod
    def of(cls, config: Any, peak: LivePeak) -> "_Sizes":
        """The keys are the positions that the cache holds, unless a head is as wide."""
        held = {tensor.shape[-2] for tensor in peak.tensors if tensor.role == KV and len(tensor.shape) == 4}
        heads = getattr(config, "num_attention_heads", None)
        width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else None)
        return cls(getattr(config, "vocab_size", None), frozenset(held - {width}))


def _kind(tensor: LiveTensor, lifecycle: Lifecycle, sizes: _Sizes) -> tuple[str, str | None, str | None]:
    if tensor.role == KV:
        return "kv", None, None
    if tensor.role == GIVEN:
        return "inputs", None, None
    if len(tensor.shape) > 1 and tensor.shape[-1] == sizes.vocabulary:
        return "logits", None, None
    if tensor.module is None:
        return ("tokens" if "float" not in tensor.dtype else "activations"), "sample", None
    place = place_of(tensor.module, lifecycle)
    if place.stage == "layer" and len(tensor.shape) > 2 and tensor.shape[-1] in sizes.keys:
        return "scores", place.stage, place.part
    return "activations", place.stage, place.part


def _tensor(tensor: LiveTensor | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return {
        "role": tensor.role,
        "bytes": tensor.bytes_,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "operator": tensor.operator,
        "module": tensor.module,
    }


def place_of(module: str, lifecycle: Lifecycle) -> Place:
    """Where a module stands, or the nearest one around it that has a place; `other` outside of all."""
    while module:
        if module in lifecycle.places:
            return lifecycle.places[module]
        module = module.rpartition(".")[0]
    return Place("other")
