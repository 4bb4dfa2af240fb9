"""What limits each stage, step and phase: time at the device's ceilings beside the time that was measured.

The roofline of Williams, Waterman and Patterson (2009), with a third term for launching operators:

    t_compute = FLOPs ÷ peak      t_memory = bytes ÷ bandwidth      t_launch = operators × launch cost

The largest names the bound. `roof` is the larger of the first two, `efficiency` = roof ÷ measured,
and *lost time* = measured − roof. Bytes are the least traffic at the span's own boundary: weights
read, KV read and written, inputs and outputs. What a cache class copies besides stands outside the
roof. A missing count or ceiling is null and makes the bound `unknown`, never a guess.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from .breakdown import StageTime, breakdown
from .ceilings import Ceilings
from .queries import OWN, SPAN_WORK, STEP_WORK
from .schema import PHASES, is_aside
from .stage_sums import is_starvation_known, phase_totals, stage_sums
from .trace import Trace
from .waits import UNKNOWN as UNKNOWN_WAITS
from .waits import Waits, by_phase, of_row

COMPUTE, MEMORY, LAUNCH, UNKNOWN = "compute", "memory", "launch", "unknown"
TIE = 0.9  # of the largest term: a second one that comes so near is named beside it
ABOVE_ROOF = 1.05
STARVED = 0.5

_TRAFFIC = ("weight_bytes", "kv_read_bytes", "kv_write_bytes")
_STEP_BYTES = (*_TRAFFIC, "activation_bytes")
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Verdict:
    """What limits a piece of work. Times in ns, intensity and ridge in FLOP a byte.

    `bound` is `compute`, `memory`, `launch` or `unknown`; `close_to` the second term where it comes
    within 10 % of the first. `fault` says that the work was measured above its roof, which no work
    is: then a ceiling or a count is wrong.
    """

    bound: str
    close_to: str | None
    intensity: float | None
    ridge: float | None
    compute_ns: float | None
    memory_ns: float | None
    launch_ns: float | None
    roof_ns: float | None
    efficiency: float | None
    lost_ns: float | None
    fault: str | None


@dataclass(frozen=True)
class Explanation:
    """Where measured time went beyond the roof, in ns; null where it cannot be told.

    `kernel_gap_ns`: what products of this many rows take beyond the roof on this device, measured.
    `copy_ns`: the cache class moving what it holds. `launch_ns`: operators × launch cost; where the
    device runs beside the host (CUDA) only what the other terms do not hide. `weights_ns`: offloaded
    weights brought to where they are used, `communication_ns`: talking to other processes, both as
    they were measured. `unexplained_ns` is the rest, below 0 where the parts come to more than was
    measured.
    """

    roof_ns: float
    kernel_gap_ns: float | None
    copy_ns: float | None
    launch_ns: float | None
    weights_ns: float | None
    communication_ns: float | None
    unexplained_ns: float
    explained_share: float


@dataclass(frozen=True)
class Work:
    """Counts of a piece of work; null where one is missing. `rows`: sequences × positions of a step at most."""

    flops: float | None
    bytes_: float | None
    op_count: float | None
    weight_bytes: float | None = None
    kv_read_bytes: float | None = None
    kv_copy_bytes: float | None = None
    rows: float | None = None
    starved_share: float | None = None

    def scaled(self, factor: float) -> "Work":
        """The same for so many times the work; rows and shares stay."""

        def times(value: float | None) -> float | None:
            return None if value is None else value * factor

        return replace(
            self,
            flops=times(self.flops),
            bytes_=times(self.bytes_),
            op_count=times(self.op_count),
            weight_bytes=times(self.weight_bytes),
            kv_read_bytes=times(self.kv_read_bytes),
            kv_copy_bytes=times(self.kv_copy_bytes),
        )


@dataclass(frozen=True)
class StageVerdict:
    """The verdict of one row of `breakdown`: a stage of a phase, or a part of it. Sums over one call."""

    phase: str
    stage: str
    part: str | None
    count: int
    time_ns: float
    share: float
    work: Work
    verdict: Verdict
    explanation: Explanation | None


@dataclass(frozen=True)
class StepVerdict:
    """The verdict of one step; `time_ns` is its wall time."""

    step: int
    phase: str
    kv_len_before: int | None
    time_ns: float
    work: Work
    verdict: Verdict


@dataclass(frozen=True)
class PhaseVerdict:
    """The verdict of all steps of a phase, as the mean over the calls.

    `mfu`: model FLOP/s achieved ÷ peak. `mbu`: bytes that had to move ÷ time ÷ bandwidth at the
    working set. `waits`: what of the time is none of the model's own work.
    """

    phase: str
    steps: int
    calls: int
    time_ns: float
    tokens: float | None
    working_set_bytes: float | None
    dtype: str
    work: Work
    verdict: Verdict
    explanation: Explanation | None
    waits: Waits
    mfu: float | None
    mbu: float | None


def verdict(
    flops: float | None,
    bytes_: float | None,
    op_count: float | None,
    measured_ns: float | None,
    ceilings: Ceilings | None,
    dtype: str,
    working_set_bytes: float | None,
    starved_share: float | None = None,
) -> Verdict:
    """Judge a piece of work against the ceilings of its device.

    Args:
        flops: 2 × multiply-adds of products, convolutions and attention; null where uncounted.
        bytes_: least traffic at its boundary.
        op_count: operators launched; null leaves the launch term null, not 0.
        measured_ns: the time it took; null or 0 leaves efficiency and lost time null.
        ceilings: of the device; null where nothing is known of it.
        dtype: torch's name of the type that is multiplied.
        working_set_bytes: weights and KV that the step goes through, which decides the bandwidth.
        starved_share: share of its calls that found the device out of work; where most did, the
            host did not launch fast enough, and that is the bound even without a count.

    The bound is `unknown` unless both compute and memory time are known. Ties go to the first of
    compute, memory, launch, and `close_to` names the other.
    """
    compute_ns = _over(flops, ceilings.peak_flops_per_s(dtype) if ceilings else None)
    memory_ns = _over(bytes_, ceilings.read_bytes_per_s(working_set_bytes) if ceilings else None)
    launch = ceilings.launch_ns.median if ceilings and ceilings.launch_ns else None
    launch_ns = op_count * launch if op_count is not None and launch is not None else None
    roof_ns = max(compute_ns, memory_ns) if compute_ns is not None and memory_ns is not None else None
    bound, close_to = _bound(compute_ns, memory_ns, launch_ns)
    if roof_ns is not None and starved_share is not None and starved_share > STARVED:
        bound, close_to = LAUNCH, None
    efficiency = roof_ns / measured_ns if roof_ns is not None and measured_ns else None
    return Verdict(
        bound=bound,
        close_to=close_to,
        intensity=flops / bytes_ if flops is not None and bytes_ else None,
        ridge=ridge(ceilings, dtype, working_set_bytes),
        compute_ns=compute_ns,
        memory_ns=memory_ns,
        launch_ns=launch_ns,
        roof_ns=roof_ns,
        efficiency=efficiency,
        lost_ns=measured_ns - roof_ns if roof_ns is not None and measured_ns else None,
        fault=_fault(efficiency, compute_ns, memory_ns),
    )


def ridge(ceilings: Ceilings | None, dtype: str, working_set_bytes: float | None) -> float | None:
    """FLOP a byte at which compute and memory time are equal: peak ÷ bandwidth."""
    if ceilings is None:
        return None
    peak, bandwidth = ceilings.peak_flops_per_s(dtype), ceilings.read_bytes_per_s(working_set_bytes)
    return peak / bandwidth if peak is not None and bandwidth is not None else None


def _over(amount: float | None, per_second: float | None) -> float | None:
    """Time in ns; nothing to do takes none, whatever the ceiling."""
    if amount == 0:
        return 0.0
    return amount / per_second * 1e9 if amount is not None and per_second is not None else None


def _bound(compute_ns: float | None, memory_ns: float | None, launch_ns: float | None) -> tuple[str, str | None]:
    """The largest term, and the second one where it is near."""
    if compute_ns is None or memory_ns is None:
        return UNKNOWN, None
    terms = [(COMPUTE, compute_ns), (MEMORY, memory_ns), (LAUNCH, launch_ns or 0.0)]
    (first, most), (second, next_most) = sorted(terms, key=lambda term: -term[1])[:2]
    if most == 0:
        return UNKNOWN, None
    return first, second if next_most >= TIE * most else None


def _fault(efficiency: float | None, compute_ns: float | None, memory_ns: float | None) -> str | None:
    if efficiency is None or efficiency <= ABOVE_ROOF or compute_ns is None or memory_ns is None:
        return None
    suspects = "the matmul ceiling is too low or its FLOPs are counted too high"
    if memory_ns >= compute_ns:
        suspects = "the bandwidth is too low (its data may lie in a cache) or its bytes are counted too high"
    return f"measured at {efficiency:.2f} times its roof: {suspects}"


# -- explanation -------------------------------------------------------------------------------


def explain(
    work: Work,
    judged: Verdict,
    measured_ns: float,
    ceilings: Ceilings | None,
    dtype: str,
    working_set_bytes: float | None,
    waits: Waits = UNKNOWN_WAITS,
) -> Explanation | None:
    """Say where measured time went beyond the roof; null where there is no roof."""
    if ceilings is None or judged.roof_ns is None or not measured_ns:
        return None
    kernel_ns = kernel_time_ns(work, ceilings, dtype, working_set_bytes)
    gap_ns = max(0.0, kernel_ns - judged.roof_ns) if kernel_ns is not None else None
    copy_ns = _over(work.kv_copy_bytes, ceilings.copy_bytes_per_s(working_set_bytes))
    on_device_ns = judged.roof_ns + (gap_ns or 0.0) + (copy_ns or 0.0)
    launch_ns = judged.launch_ns
    if launch_ns is not None and ceilings.device.type != "cpu":
        launch_ns = max(0.0, launch_ns - on_device_ns)
    explained_ns = on_device_ns + (launch_ns or 0.0) + waits.total_ns
    return Explanation(
        roof_ns=judged.roof_ns,
        kernel_gap_ns=gap_ns,
        copy_ns=copy_ns,
        launch_ns=launch_ns,
        weights_ns=waits.weights_ns,
        communication_ns=waits.communication_ns,
        unexplained_ns=measured_ns - explained_ns,
        explained_share=min(1.0, explained_ns / measured_ns),
    )


def kernel_time_ns(work: Work, ceilings: Ceilings, dtype: str, working_set_bytes: float | None) -> float | None:
    """What this device's own kernels take for weight products of so few rows; null where none were measured.

    One row is a matrix–vector product, timed by the bytes of its matrices. Of more rows the number
    is FLOPs ÷ (2 × weights), at most the positions of the step: work beside the weights, as
    attention's, adds none.
    """
    if not work.flops or not work.weight_bytes or work.rows is None:
        return None
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        return None
    rows = min(work.rows, max(1.0, work.flops * item_bytes / (2 * work.weight_bytes)))
    if rows <= 1:
        return _over(work.bytes_, ceilings.matvec_bytes_per_s(dtype, working_set_bytes))
    return _over(work.flops, ceilings.linear_flops_per_s(dtype, rows))


# -- traces ------------------------------------------------------------------------------------


def rooflines(trace: Trace, ceilings: Ceilings | None) -> list[StageVerdict]:
    """Judge each row of `breakdown`: every stage of both phases, and below it its parts."""
    works = trace.once("stage_works", lambda: _stage_works(trace))
    facts = {phase: _PhaseFacts.of(trace, phase) for phase in PHASES}
    rows = breakdown(trace)
    return [_stage_verdict(row, of_row(row, rows), works, facts[row.phase], ceilings) for row in rows]


def step_verdicts(trace: Trace, ceilings: Ceilings | None, only: Collection[int] | None = None) -> list[StepVerdict]:
    """Judge each top-level step that statistics count, by its wall time; or some of them alone."""
    dtype, steps = model_dtype(trace), counted_steps(trace)
    chosen = steps if only is None else [step for step in steps if step["step"] in only]
    return [_step_verdict(trace, step, dtype, ceilings) for step in chosen]


def phase_verdicts(trace: Trace, ceilings: Ceilings | None) -> list[PhaseVerdict]:
    """Judge prefill and decode as wholes; a phase without steps has no row."""
    totals, starved, waits = phase_totals(trace), _starved_shares(trace), by_phase(trace)
    return [
        _phase_verdict(trace, totals[phase], starved.get(phase), waits.get(phase, Waits()), ceilings)
        for phase in PHASES
        if phase in totals
    ]


def counted_steps(trace: Trace) -> list[dict[str, Any]]:
    """Rows of the steps that statistics count: at the top level, used, not of the warm-up."""
    return trace.once("counted_steps", lambda: _counted_steps(trace))


def _counted_steps(trace: Trace) -> list[dict[str, Any]]:
    names = ["step", "call", "phase", "parent_step", "warmup", "discarded", "batch", "kv_len_before", "wall_ns"]
    names += ["tokens_processed", "tokens_real", "kv_bytes", "flops", "op_count", "kv_copy_bytes", *_STEP_BYTES]
    rows = trace.table("steps").select(names).to_pylist()
    return [row for row in rows if row["parent_step"] is None and not row["warmup"] and not row["discarded"]]


def model_dtype(trace: Trace) -> str:
    """The dtype of the model's weights, as torch names it; empty where the trace does not say."""
    return str((trace.meta.get("model") or {}).get("dtype") or "").removeprefix("torch.")


def working_set(trace: Trace, step: dict[str, Any]) -> float | None:
    """Bytes that a step goes through: weights that it reads and the KV that it holds."""
    weights = step["weight_bytes"]
    if weights is None:
        weights = (trace.meta.get("model") or {}).get("weight_bytes")
    return None if weights is None else weights + (step["kv_bytes"] or 0)


def total(values: Iterable[float | None]) -> float | None:
    """The sum; null where one is null."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if len(known) == len(listed) else None


@dataclass(frozen=True)
class _PhaseFacts:
    """What all stages of a phase share: means over its steps."""

    dtype: str
    working_set_bytes: float | None
    rows: float | None

    @classmethod
    def of(cls, trace: Trace, phase: str) -> "_PhaseFacts":
        totals = phase_totals(trace).get(phase)
        if totals is None:
            return cls(model_dtype(trace), None, None)
        tokens, known = totals["tokens_processed"], totals["tokens_processed_known"]
        return cls(model_dtype(trace), _mean_working_set(trace, totals), tokens / known if known else None)


def _mean_working_set(trace: Trace, totals: dict[str, Any]) -> float | None:
    """The mean of `working_set` over the steps of a phase, of which it is known."""
    weights, known, steps = totals["weight_bytes"] or 0, totals["weight_bytes_known"], totals["steps"]
    whole = (trace.meta.get("model") or {}).get("weight_bytes")
    if whole is not None:
        return (weights + (steps - known) * whole + (totals["kv_bytes"] or 0)) / steps
    return (weights + (totals["kv_bytes_beside"] or 0)) / known if known else None


@dataclass(frozen=True)
class _SpanSums:
    """Sums over the recorded spans of one stage or part; null where one span's count is null."""

    work: Work
    host_ns: float
    device_ns: float | None
    dtype: str | None


_Key = tuple[str, str, str | None]


def _stage_verdict(
    row: StageTime, waits: Waits, works: dict[_Key, _SpanSums], facts: _PhaseFacts, ceilings: Ceilings | None
) -> StageVerdict:
    sums = works.get((row.phase, row.stage, row.part))
    time_ns, work, dtype = row.time_ns, Work(None, None, None), facts.dtype
    if sums is not None:
        per_call = row.time_ns / sums.host_ns if sums.host_ns else 0.0
        work = replace(sums.work.scaled(per_call), rows=facts.rows)
        dtype = facts.dtype or sums.dtype or ""
        time_ns = sums.device_ns * per_call if sums.device_ns is not None else row.time_ns
    size = facts.working_set_bytes
    if row.time_ns:  # the waits are on the host's clock, the row may be on the device's
        waits = waits.scaled(time_ns / row.time_ns)
    if is_aside(row.part):
        judged, explanation = _waiting(time_ns, waits)
    else:
        judged = verdict(work.flops, work.bytes_, work.op_count, time_ns, ceilings, dtype, size, work.starved_share)
        explanation = explain(work, judged, time_ns, ceilings, dtype, size, waits)
    return StageVerdict(row.phase, row.stage, row.part, row.count, time_ns, row.share, work, judged, explanation)


def _waiting(time_ns: float, waits: Waits) -> tuple[Verdict, Explanation | None]:
    """Of time in which nothing of the model's own work was done: its roof is none, whatever the device; all is lost."""
    judged = Verdict(UNKNOWN, None, None, None, None, None, None, 0.0, None, time_ns, None)
    return judged, Explanation(0.0, None, None, None, waits.weights_ns, waits.communication_ns, 0.0, 1.0)


def _stage_works(trace: Trace) -> dict[_Key, _SpanSums]:
    """Sums of the rows that `breakdown` has, by phase, stage and part."""
    dtypes = {} if model_dtype(trace) else _span_dtypes(trace)
    works: dict[_Key, _SpanSums] = {}
    for row in stage_sums(trace).to_pylist():
        key = (row["phase"], row["stage"], row["part"] or None)
        works[key] = _span_sums(row, dtypes.get(key[1:]))
    for phase in PHASES:
        own = _own(phase, works)
        if own is not None:
            works[(phase, "layer", OWN)] = own
    return works


def _span_dtypes(trace: Trace) -> dict[tuple[str, str | None], str]:
    """What the spans of each stage and part put out, where the model's own dtype is not known."""
    names = ("stage", "part", "dtype")
    spans = trace.table("spans", names)
    words = pa.table({name: spans[name].cast(pa.string()) for name in names})
    rows = words.group_by(list(names), use_threads=False).aggregate([]).to_pylist()
    return {(row["stage"], row["part"]): row["dtype"] for row in reversed(rows) if row["dtype"] is not None}


def _own(phase: str, works: dict[_Key, _SpanSums]) -> _SpanSums | None:
    """What a layer does outside its parts: its operators and FLOPs less theirs; its own bytes are not known."""
    layer = works.get((phase, "layer", None))
    parts = [sums for key, sums in works.items() if key[:2] == (phase, "layer") and key[2] is not None]
    if layer is None or not parts:
        return None

    def less(whole: float | None, inner: float | None) -> float | None:
        return None if whole is None or inner is None else whole - inner

    flops = less(layer.work.flops, total(part.work.flops for part in parts))
    operators = less(layer.work.op_count, total(part.work.op_count for part in parts))
    device_ns = less(layer.device_ns, total(part.device_ns for part in parts))
    return _SpanSums(
        Work(flops, None, operators), layer.host_ns - sum(part.host_ns for part in parts), device_ns, layer.dtype
    )


def _span_sums(row: dict[str, Any], dtype: str | None) -> _SpanSums:
    known = {name: row[name] if row[f"{name}_known"] == row["count"] else None for name in SPAN_WORK}
    work = Work(
        flops=known["flops"],
        bytes_=total(known[name] for name in (*_TRAFFIC, "input_bytes", "output_bytes")),
        op_count=known["op_count"],
        weight_bytes=known["weight_bytes"],
        kv_read_bytes=known["kv_read_bytes"],
        kv_copy_bytes=known["kv_copy_bytes"],
        starved_share=row["starved"] / row["starved_known"] if row["starved_known"] else None,
    )
    return _SpanSums(work, float(row["host_ns"]), known["device_ns"], dtype)


def _step_work(step: dict[str, Any]) -> Work:
    return Work(
        flops=step["flops"],
        bytes_=total(step[name] for name in _STEP_BYTES),
        op_count=step["op_count"],
        weight_bytes=step["weight_bytes"],
        kv_read_bytes=step["kv_read_bytes"],
        kv_copy_bytes=step["kv_copy_bytes"],
        rows=step["tokens_processed"],
    )


def _step_verdict(trace: Trace, step: dict[str, Any], dtype: str, ceilings: Ceilings | None) -> StepVerdict:
    work, size, time_ns = _step_work(step), working_set(trace, step), float(step["wall_ns"] or 0)
    judged = verdict(work.flops, work.bytes_, work.op_count, time_ns, ceilings, dtype, size)
    return StepVerdict(step["step"], step["phase"], step["kv_len_before"], time_ns, work, judged)


def _phase_verdict(
    trace: Trace, totals: dict[str, Any], starved_share: float | None, waits: Waits, ceilings: Ceilings | None
) -> PhaseVerdict:
    phase, calls = totals["phase"], totals["calls"]
    facts = _PhaseFacts.of(trace, phase)
    known = {name: totals[name] if totals[f"{name}_known"] == totals["steps"] else None for name in STEP_WORK}
    work = Work(
        flops=known["flops"],
        bytes_=total(known[name] for name in _STEP_BYTES),
        op_count=known["op_count"],
        weight_bytes=known["weight_bytes"],
        kv_read_bytes=known["kv_read_bytes"],
        kv_copy_bytes=known["kv_copy_bytes"],
        rows=facts.rows,
        starved_share=starved_share,
    ).scaled(1 / calls)
    time_ns = float(totals["wall_ns"]) / calls
    tokens = known["tokens_processed"]
    size = facts.working_set_bytes
    judged = verdict(work.flops, work.bytes_, work.op_count, time_ns, ceilings, facts.dtype, size, starved_share)
    return PhaseVerdict(
        phase=phase,
        steps=totals["steps"],
        calls=calls,
        time_ns=time_ns,
        tokens=None if tokens is None else tokens / calls,
        working_set_bytes=size,
        dtype=facts.dtype,
        work=work,
        verdict=judged,
        explanation=explain(work, judged, time_ns, ceilings, facts.dtype, size, waits),
        waits=waits,
        mfu=judged.compute_ns / time_ns if judged.compute_ns is not None and time_ns else None,
        mbu=judged.memory_ns / time_ns if judged.memory_ns is not None and time_ns else None,
    )


def _starved_shares(trace: Trace) -> dict[str, float]:
    """Share of the layers of each phase that found the device out of work; empty where that was not asked."""
    if not is_starvation_known(trace):
        return {}
    rows = [row for row in stage_sums(trace).to_pylist() if (row["stage"], row["part"]) == ("layer", "")]
    return {row["phase"]: row["starved"] / row["starved_known"] for row in rows if row["starved_known"]}
