"""What a step takes at least: its FLOPs and bytes at a device's ceilings, and where the bound turns.

These are floors. Kernels reach less than the ceilings, launching operators costs besides, and
several devices have to talk to each other: none of that is in them.
"""

from dataclasses import dataclass

from .ceilings import Ceilings
from .memory_plan import ITEM_BYTES, Format, Quantity
from .roofline import UNKNOWN, verdict
from .verdicts import decode_batch, prefill_length


@dataclass(frozen=True)
class StepWork:
    """What one forward does and moves, for all of its sequences. Null where a count is unknown.

    `flops` counts the query–key pairs that causality and windows let through, `flops_dense` all.
    `read_weight_bytes` leaves out stacked experts: `expert_bytes` is of one expert of each stack
    together, `experts` how many there are, `chosen` how many of them each token takes.
    """

    tokens: int
    flops: int | None
    flops_dense: int | None
    head_flops: int
    read_weight_bytes: int
    activation_bytes: int
    kv_read_bytes: int | None
    kv_write_bytes: int | None
    expert_bytes: int = 0
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True)
class StepFloor:
    """The least time of a step. Times in ns; null, with the bound `unknown`, where there is no ceiling or count."""

    phase: str
    tokens: int
    context: int
    flops: int | None
    flops_dense: int | None
    bytes_: int | None
    intensity: float | None
    ridge: float | None
    bound: str
    close_to: str | None
    compute_ns: float | None
    memory_ns: float | None
    floor_ns: float | None
    formula: str


@dataclass(frozen=True)
class Packing:
    """How stored weights differ from those that were counted: bytes saved in dense matrices, share kept of experts.

    `kv_share` is bytes of stored KV ÷ bytes counted.
    """

    saved_bytes: int = 0
    expert_share: float = 1.0
    kv_share: float = 1.0


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Experts of a layer that a step reads, if tokens choose evenly: E · (1 − (1 − k/E)^t); k of them for one token."""
    if not experts:
        return 0.0
    return experts * (1 - (1 - chosen / experts) ** tokens)


def moved_bytes(work: StepWork, packing: Packing) -> int | None:
    """The least that a step moves: weights read, KV read and written, activations at the stages' boundaries."""
    if work.kv_read_bytes is None or work.kv_write_bytes is None:
        return None
    used = distinct_experts(work.experts, work.chosen, work.tokens)
    weights = work.read_weight_bytes - packing.saved_bytes + used * work.expert_bytes * packing.expert_share
    kv = (work.kv_read_bytes + work.kv_write_bytes) * packing.kv_share
    return round(weights + kv + work.activation_bytes)


def step_floor(
    phase: str,
    work: StepWork,
    context: int,
    packing: Packing,
    ceilings: Ceilings | None,
    stored: Format,
    parallel: int,
    working_set_bytes: int,
) -> StepFloor:
    """Judge a planned step by the roofline of a trace's verdicts: t = max(FLOPs ÷ peak, bytes ÷ bandwidth).

    Args:
        phase: `prefill` or `decode`.
        work: its counts.
        context: positions in the cache after it.
        packing: how weights and KV are stored.
        ceilings: of one device; null where none is named.
        stored: the format of the weights, which says in what type they are multiplied.
        parallel: devices that share each step's work evenly.
        working_set_bytes: weights and KV, which decide the bandwidth of a device with caches.
    """
    bytes_ = moved_bytes(work, packing)
    multiplied = multiplied_dtype(ceilings, stored)
    flops_each = work.flops / parallel if work.flops is not None else None
    bytes_each = bytes_ / parallel if bytes_ is not None else None
    judged = verdict(flops_each, bytes_each, None, None, ceilings, multiplied, working_set_bytes / parallel)
    peak = ceilings.peak_flops_per_s(multiplied) if ceilings else None
    bandwidth = ceilings.read_bytes_per_s(working_set_bytes / parallel) if ceilings else None
    return StepFloor(
        phase=phase,
        tokens=work.tokens,
        context=context,
        flops=work.flops,
        flops_dense=work.flops_dense,
        bytes_=bytes_,
        intensity=judged.intensity,
        ridge=judged.ridge,
        bound=judged.bound,
        close_to=judged.close_to,
        compute_ns=judged.compute_ns,
        memory_ns=judged.memory_ns,
        floor_ns=judged.roof_ns if judged.bound != UNKNOWN else None,
        formula=_floor_formula(work.flops, bytes_, peak, bandwidth, parallel, multiplied),
    )


def multiplied_dtype(ceilings: Ceilings | None, stored: Format) -> str:
    """The type in which a device multiplies: the format's, or that of activations where the device lacks it."""
    candidates = (stored.multiplied, stored.dtype, "float16")
    known = (dtype for dtype in candidates if ceilings is not None and ceilings.peak_flops_per_s(dtype) is not None)
    return next(known, stored.multiplied)


def _floor_formula(
    flops: int | None, bytes_: int | None, peak: float | None, bandwidth: float | None, parallel: int, dtype: str
) -> str:
    if flops is None or bytes_ is None or peak is None or bandwidth is None:
        return "no ceilings: name a device with --gpu"
    shared = f" ÷ {parallel}" if parallel > 1 else ""
    return (
        f"max({flops:,} FLOP{shared} ÷ {peak / 1e12:,.4g} TFLOP/s in {dtype},"
        f" {bytes_:,} B{shared} ÷ {bandwidth / 1e9:,.4g} GB/s)"
    )


@dataclass(frozen=True)
class Crossovers:
    """Where the bound turns on a device; null where it does not, or where nothing says.

    `decode_batch`: sequences from which on decode is compute-bound at this context.
    `prefill_length`: prompt tokens of each sequence from which on prefill is. `kv_context`:
    positions from which on a decode step reads more KV than weights, at this batch.
    """

    decode_batch: int | None
    prefill_length: int | None
    kv_context: int | None


def crossovers(
    decode: StepWork,
    shorter_decode: StepWork,
    short_prefill: StepWork,
    batch: int,
    packing: Packing,
    ceilings: Ceilings,
    stored: Format,
    kv_per_token: int | None,
) -> Crossovers:
    """Find where the bound turns, from a decode step, the one before it, and a prefill of few tokens.

    A mixture counts with all of its experts: at these batches and lengths all of them are read.
    """
    every = decode.experts * decode.expert_bytes * packing.expert_share
    weights = decode.read_weight_bytes - packing.saved_bytes + every
    context = kv_context(decode, packing, batch, kv_per_token)
    peak = ceilings.peak_flops_per_s(multiplied_dtype(ceilings, stored))
    bandwidth = ceilings.read_bytes_per_s(weights)
    if peak is None or bandwidth is None or decode.flops is None or short_prefill.flops is None:
        return Crossovers(None, None, context)
    if decode.kv_read_bytes is None or decode.kv_write_bytes is None:
        return Crossovers(None, None, context)
    kv = (decode.kv_read_bytes + decode.kv_write_bytes) * packing.kv_share
    rows = decode_batch(decode.flops / batch, (kv + decode.activation_bytes) / batch, weights, peak, bandwidth)
    pair = max(0.0, (decode.flops - (shorter_decode.flops or decode.flops)) / batch)
    once = short_prefill.head_flops / batch
    tokens = short_prefill.tokens // batch
    per_token = (short_prefill.flops / batch - once - pair * tokens * (tokens + 1) / 2) / tokens
    moved = ((short_prefill.kv_write_bytes or 0) * packing.kv_share + short_prefill.activation_bytes) / batch / tokens
    length = prefill_length(per_token, pair, once, moved, weights, batch, peak, bandwidth)
    return Crossovers(rows, length, context)


def kv_context(decode: StepWork, packing: Packing, batch: int, kv_per_token: int | None) -> int | None:
    """Positions from which on a decode step reads more KV than weights: weights ÷ KV bytes of a position.

    Null where what is read does not grow in proportion to the positions.
    """
    if not kv_per_token:
        return None
    used = distinct_experts(decode.experts, decode.chosen, decode.tokens)
    weights = decode.read_weight_bytes - packing.saved_bytes + used * decode.expert_bytes * packing.expert_share
    return max(1, int(-(-weights // (batch * kv_per_token * packing.kv_share))))


def step_name(step: StepFloor) -> tuple[str, str]:
    """A key and a name for a step: what tells it from the others of a plan."""
    if step.phase == "prefill":
        return "prefill", f"prefill, {step.tokens:,} tokens"
    return f"decode_{step.context}", f"decode at {step.context:,}"


def generation_flops(prefill: int | None, decode: list[int | None], dense: bool) -> Quantity:
    """FLOPs of a whole `generate()`: the prefill and every decode step, of which the first token needs none."""
    known = [flops for flops in (prefill, *decode) if flops is not None]
    value = sum(known) if len(known) == len(decode) + 1 else None
    key = "generate_flops_dense" if dense else "generate_flops"
    formula = f"{prefill or 0:,} of the prefill + {sum(f or 0 for f in decode):,} of {len(decode):,} decode steps"
    return Quantity(key, f"generate, prefill and {len(decode):,} decode steps", value, "FLOP", formula)


def kv_item_share(kv_dtype: str | None, dtype: str) -> float:
    """Bytes of stored KV ÷ bytes in the model's own dtype."""
    return 1.0 if kv_dtype is None else ITEM_BYTES[kv_dtype] / ITEM_BYTES[dtype]
