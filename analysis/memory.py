"""Where the bytes of a run's highest moment went: what stays, what lives for a moment, and what is around them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from .memory_plan import PredictionRow, Quantity, predictions
from .trace import Trace

PERSISTENT = ("weights", "buffers", "kv", "inputs")


@dataclass(frozen=True)
class Piece:
    """Bytes of one kind at the highest moment; `share` is of all live tensor bytes then.

    `persistent` tells what stays over the steps (weights, buffers, KV, what the caller holds) from
    what a step makes and drops (activations, attention scores, logits, the loop's token ids).
    """

    kind: str
    stage: str | None
    part: str | None
    bytes_: int
    share: float
    persistent: bool


@dataclass(frozen=True)
class Memory:
    """The highest moment of a run's live tensors, with its pieces, which add up to `peak_bytes`.

    `step` counts within the call; `during` names what ran then and `maker` the tensor that made the peak.
    `allocator_peak_bytes` is what the device's caching allocator held at most in the timed run and
    `rounding_bytes` what of it is neither of these tensors: block rounding and the kernels' own
    workspaces. `slack_bytes` is reserved from the device beyond that. `process_bytes` is the resident
    memory of the process, which also holds code, and on a CPU the tensors. Each is null where it was not measured.
    """

    source: str
    peak_bytes: int
    step: int
    during: str
    maker: dict[str, Any] | None
    pieces: list[Piece]
    persistent_bytes: int
    transient_bytes: int
    held_after_bytes: int | None
    held_after: list[dict[str, Any]]
    allocator_peak_bytes: int | None
    rounding_bytes: int | None
    slack_bytes: int | None
    process_bytes: int | None

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, largest first."""
        sums: Counter[str] = Counter()
        for piece in self.pieces:
            sums[piece.kind] += piece.bytes_
        return dict(sums.most_common())


def memory(trace: Trace) -> Memory | None:
    """What the highest moment was made of; null where the run did not look."""
    facts = trace.meta.get("memory")
    if not facts:
        return None
    peak, pieces = facts["peak_bytes"], [_piece(row, facts["peak_bytes"]) for row in facts["pieces"]]
    on_cuda = (trace.meta.get("device") or {}).get("type") == "cuda"
    allocator = _highest(trace, "mem_peak_bytes") if on_cuda else None
    reserved = _highest(trace, "mem_reserved_bytes") if on_cuda else None
    persistent = sum(piece.bytes_ for piece in pieces if piece.persistent)
    return Memory(
        source=facts["source"],
        peak_bytes=peak,
        step=facts["step"],
        during=_during(facts),
        maker=facts["maker"],
        pieces=pieces,
        persistent_bytes=persistent,
        transient_bytes=peak - persistent,
        held_after_bytes=facts.get("held_after_bytes"),
        held_after=facts.get("held_after") or [],
        allocator_peak_bytes=allocator,
        rounding_bytes=allocator - peak if allocator is not None else None,
        slack_bytes=reserved - allocator if reserved is not None and allocator is not None else None,
        process_bytes=_highest(trace, "rss_bytes"),
    )


def predicted(trace: Trace) -> list[PredictionRow]:
    """What was planned beside what was measured: weights, KV, logits, peak; none where nothing was planned."""
    facts = trace.meta.get("predictions")
    if not facts:
        return []
    quantities = [Quantity(**row) for row in facts["rows"]]
    found = memory(trace)
    measured = {
        "weights": (trace.meta.get("model") or {}).get("weight_bytes"),
        "kv": _last_kv(trace),
        "logits": found.by_kind().get("logits") if found is not None else None,
        "peak": found.peak_bytes if found is not None else None,
    }
    return predictions(quantities, measured)


def _last_kv(trace: Trace) -> int | None:
    """Bytes of the cache after the last main step of the trace."""
    steps = trace.table("steps").select(["step", "role", "discarded", "kv_bytes"]).to_pylist()
    rows = [row for row in steps if row["role"] == "main" and not row["discarded"]]
    last = max(rows, key=lambda row: row["step"], default=None)
    return last["kv_bytes"] if last is not None else None


def _piece(row: dict[str, Any], peak_bytes: int) -> Piece:
    share = row["bytes"] / peak_bytes if peak_bytes else 0.0
    return Piece(row["kind"], row["stage"], row["part"], row["bytes"], share, row["kind"] in PERSISTENT)


def _during(facts: dict[str, Any]) -> str:
    """Where the run was at its highest moment: `layer 5, mlp`, or `sample` outside of the model."""
    layer = f" {facts['layer']}" if facts["layer"] is not None else ""
    return f"{facts['stage']}{layer}" + (f", {facts['part']}" if facts["part"] else "")


def _highest(trace: Trace, column: str) -> int | None:
    value: int | None = pc.max(trace.table("steps")[column]).as_py()
    return value
