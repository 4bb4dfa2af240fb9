"""The summary of a trace: what `show`, the end of `run`, `--json` and notebooks all say."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import pyarrow.compute as pc

from .breakdown import StageTime, breakdown
from .kv_use import KVUse, kv_use
from .latency import Latency, latency
from .memory import Memory, memory
from .operators import OperatorTime, operators
from .ranks import RankTime, rank_times
from .stage_sums import recorded_steps, steps_per_call
from .trace import Trace
from .verdicts import UNSTEADY, Verdicts, judge


@dataclass(frozen=True)
class Summary:
    """Headline facts of one trace; null where the trace does not hold them."""

    path: str
    status: str
    model: dict[str, Any]
    device: dict[str, Any]
    prompt: list[str] | None
    output: list[str] | None
    stop_reason: str | None
    drafted: int | None
    accepted: int | None
    verdicts: Verdicts
    latency: Latency
    stages: list[StageTime]
    operators: list[OperatorTime]
    steps: int
    steps_recorded: int
    steps_per_call: dict[str, float]
    kv_bytes: int | None
    kv_allocated_bytes: int | None
    kv_positions: int | None
    kv_use: KVUse | None
    flops_prefill: int | None
    flops_decode: int | None
    peak_memory_bytes: int | None
    memory: Memory | None
    ranks: list[RankTime]
    post_mortem: dict[str, Any] | None
    overhead: dict[str, Any] | None
    uncounted: list[dict[str, Any]] | None
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {
            "verdicts": self.verdicts.to_json(),
            "latency": asdict(self.latency),
            "kv_use": asdict(self.kv_use) if self.kv_use else None,
            "memory": memory_document(self.memory),
            "stages": [asdict(row) for row in self.stages],
            "operators": [asdict(row) for row in self.operators],
            "ranks": [asdict(row) for row in self.ranks],
        }


def summarize(trace: Trace) -> Summary:
    """Summarise a trace."""
    meta = trace.meta
    steps = trace.table("steps")
    last = _last_step(trace)
    verdicts = judge(trace)
    calls = [call for call in meta.get("calls") or [] if call.get("parent_step") is None]
    return Summary(
        path=str(trace.path),
        status=str(meta.get("status")),
        model={key: value for key, value in (meta.get("model") or {}).items() if key != "config"},
        device=meta.get("device") or {},
        prompt=meta.get("prompt"),
        output=meta.get("output"),
        stop_reason=next((call["stop_reason"] for call in reversed(calls) if call.get("stop_reason")), None),
        drafted=_total(calls, "drafted"),
        accepted=_total(calls, "accepted"),
        verdicts=verdicts,
        latency=latency(trace),
        stages=breakdown(trace),
        operators=operators(trace),
        steps=len(steps),
        steps_recorded=recorded_steps(trace),
        steps_per_call=steps_per_call(trace),
        kv_bytes=last.get("kv_bytes"),
        kv_allocated_bytes=last.get("kv_allocated_bytes"),
        kv_positions=last.get("kv_len_after"),
        kv_use=kv_use(trace),
        flops_prefill=_flops(trace, "prefill"),
        flops_decode=_flops(trace, "decode"),
        peak_memory_bytes=pc.max(steps["mem_peak_bytes"]).as_py(),
        memory=memory(trace),
        ranks=rank_times(trace),
        post_mortem=meta.get("post_mortem"),
        overhead=meta.get("overhead"),
        uncounted=meta.get("uncounted"),
        notes=[*(meta.get("notes") or []), *trace.gaps, *verdicts.notes, *_doubts(trace)],
    )


def memory_document(found: Memory | None) -> dict[str, Any] | None:
    """The memory of a run as plain dictionaries."""
    if found is None:
        return None
    pieces = [asdict(piece) | {"bytes": piece.bytes_} for piece in found.pieces]
    return asdict(found) | {"pieces": [{k: v for k, v in piece.items() if k != "bytes_"} for piece in pieces]}


def _total(calls: list[dict[str, Any]], key: str) -> int | None:
    """Sum over the calls that drafted; null where none did."""
    values = [call[key] for call in calls if call.get(key) is not None]
    return sum(values) if values else None


def _doubts(trace: Trace) -> list[str]:
    """What the reader should know of this trace besides what the run itself noted."""
    doubts = []
    noise = (trace.meta.get("overhead") or {}).get("noise")
    if noise is not None and noise > UNSTEADY:
        doubts.append(f"equal untraced runs differ by {noise - 1:.0%}: this machine was not quiet, doubt the times")
    if not len(trace.table("steps")):
        doubts.append("this trace holds no steps")
    elif not recorded_steps(trace):
        doubts.append("this trace holds no spans: no step of those that ran was recorded in detail")
    return doubts


def _last_step(trace: Trace) -> dict[str, Any]:
    """The last main step, whose KV cache is the fullest of its call."""
    steps = trace.table("steps", ["step", "role", "discarded", "kv_bytes", "kv_allocated_bytes", "kv_len_after"])
    is_main = pc.and_(pc.equal(steps["role"], "main"), pc.invert(pc.fill_null(steps["discarded"], False)))
    main = steps.filter(is_main)
    last = main.filter(pc.equal(main["step"], pc.max(main["step"]))).to_pylist()
    return last[0] if last else {}


def _flops(trace: Trace, phase: str) -> int | None:
    """FLOPs of a phase in the first call; null where a step of it has no count."""
    steps = trace.table("steps", ["call", "phase", "flops"])
    of_first = pc.and_(pc.equal(steps["call"], pc.min(steps["call"])), pc.equal(steps["phase"], phase))
    values = steps["flops"].filter(of_first)
    total: int | None = pc.sum(values).as_py() if not values.null_count else None
    return total
