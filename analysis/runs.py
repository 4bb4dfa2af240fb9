"""One line a run: what a folder of runs is listed by, and what a sweep plots."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc

from lifetrace.errors import TraceError

from .ceilings import of_manifest
from .latency import latency
from .roofline import PhaseVerdict, phase_verdicts
from .trace import Trace, read_trace, trace_folders

UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Run:
    """One trace in figures, each null where the trace does not hold it. `run_id` is that of its tables' rows.

    Times are ns, medians over its calls as in `latency`. `prefill_step_ns` and `decode_step_ns` are
    the mean of a step, `…_roof_ns` the floor beside it: the larger of its FLOPs at the device's peak
    and its bytes at the bandwidth. `batch` counts sequences, `prompt_tokens` those of the longest
    prompt, `new_tokens` those of the longest answer. `overhead` is traced ÷ untraced and `noise` the
    same ratio between equal untraced runs. `peak_memory_bytes`: CUDA's allocator; live tensors on a CPU.
    """

    name: str
    status: str
    error: str | None = None
    run_id: str | None = None
    model: str | None = None
    device: str | None = None
    threads: int | None = None
    dtype: str | None = None
    attention: str | None = None
    kv_kinds: str | None = None
    prompt_tokens: int | None = None
    batch: int | None = None
    new_tokens: int | None = None
    calls: int | None = None
    ttft_ns: float | None = None
    tpot_ns: float | None = None
    itl_p50_ns: float | None = None
    itl_p95_ns: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    kv_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    prefill_step_ns: float | None = None
    prefill_roof_ns: float | None = None
    prefill_efficiency: float | None = None
    prefill_bound: str | None = None
    prefill_close_to: str | None = None
    decode_step_ns: float | None = None
    decode_roof_ns: float | None = None
    decode_efficiency: float | None = None
    decode_bound: str | None = None
    decode_close_to: str | None = None
    overhead: float | None = None
    noise: float | None = None
    tokens_identical: bool | None = None
    ceilings_source: str | None = None


_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def read_runs(path: Path) -> list[Run]:
    """The runs in a folder, by name; one that cannot be read is listed with the reason.

    Raises:
        TraceError: the folder holds no trace.
    """
    folders = trace_folders(path)
    if not folders:
        raise TraceError(f"{path} holds no traces: no folder in it has a run.json. Give a folder of runs, or a trace.")
    return [_read(folder, path) for folder in folders]


def _read(folder: Path, path: Path) -> Run:
    """A run by its place in the folder of runs."""
    name = str(folder.relative_to(path)) if folder != path else folder.name
    try:
        return replace(run_of(read_trace(folder)), name=name)
    except TraceError as error:
        return Run(name, UNREADABLE, str(error))


def run_of(trace: Trace) -> Run:
    """The figures of one trace.

    Raises:
        TraceError: a table of it cannot be read.
    """
    trace.table("steps")  # whole, once: what follows asks for a column here and a column there
    meta, numbers = trace.meta, latency(trace, split=False)
    model, device, overhead = (meta.get(key) or {} for key in ("model", "device", "overhead"))
    calls = [call for call in meta.get("calls") or [] if call.get("parent_step") is None]
    ceilings, _ = of_manifest(meta)
    last = _fullest_cache(trace)
    return Run(
        name=trace.path.name,
        status=str(meta.get("status")),
        error=meta.get("error"),
        run_id=meta.get("run_id"),
        model=model.get("id"),
        device=device.get("name"),
        threads=device.get("threads"),
        dtype=model.get("dtype"),
        attention=model.get("attention"),
        kv_kinds=_kv_kinds(trace),
        prompt_tokens=max((n for call in calls[:1] for n in call.get("prompt_tokens") or []), default=None),
        batch=numbers.sequences,
        new_tokens=max((n for call in calls[:1] for n in call.get("new_tokens") or []), default=None),
        calls=numbers.calls,
        ttft_ns=numbers.ttft_ns,
        tpot_ns=numbers.tpot_ns,
        itl_p50_ns=numbers.itl_p50_ns,
        itl_p95_ns=numbers.itl_p95_ns,
        prefill_tokens_per_s=numbers.prefill_tokens_per_s,
        decode_tokens_per_s=numbers.decode_tokens_per_s,
        peak_memory_bytes=pc.max(trace.table("steps")["mem_peak_bytes"]).as_py(),
        kv_bytes=last.get("kv_bytes"),
        kv_allocated_bytes=last.get("kv_allocated_bytes"),
        **{key: value for phase in phase_verdicts(trace, ceilings) for key, value in _phase(phase).items()},
        overhead=overhead.get("ratio"),
        noise=overhead.get("noise"),
        tokens_identical=overhead.get("tokens_identical"),
        ceilings_source=ceilings.source if ceilings else None,
    )


def _phase(phase: PhaseVerdict) -> dict[str, Any]:
    """A phase's verdict a step, with the phase's name before each key."""
    judged, calls_a_step = phase.verdict, phase.calls / phase.steps
    row = {
        "step_ns": phase.time_ns * calls_a_step,
        "roof_ns": judged.roof_ns * calls_a_step if judged.roof_ns is not None else None,
        "efficiency": judged.efficiency,
        "bound": judged.bound,
        "close_to": judged.close_to,
    }
    return {f"{phase.phase}_{key}": value for key, value in row.items()}


def _fullest_cache(trace: Trace) -> dict[str, Any]:
    """What the cache held after the step that left it fullest."""
    rows = trace.table("steps").select(["role", "kv_bytes", "kv_allocated_bytes"]).to_pylist()
    held = [row for row in rows if row["role"] == "main" and row["kv_bytes"] is not None]
    return max(held, key=lambda row: row["kv_bytes"], default={})


def _kv_kinds(trace: Trace) -> str | None:
    """The kinds of the cache's layers, such as `full` or `full, sliding`; null where no cache was seen."""
    kinds = pc.unique(trace.table("kv", ["kind"])["kind"].cast(pa.string())).to_pylist()
    return ", ".join(sorted(kind for kind in kinds if kind is not None)) or None


def table_of(rows: Iterable[dict[str, Any]], *kinds: type) -> pa.Table:
    """Rows as a table whose columns are the fields of dataclasses, of their types also where all are null."""
    types = {field.name: _arrow_type(field.type) for kind in kinds for field in fields(kind)}
    return pa.Table.from_pylist(list(rows), schema=pa.schema(list(types.items())))


def _arrow_type(annotation: Any) -> pa.DataType:
    """The column type of what is annotated `int`, `float | None` and so on."""
    return next(_ARROW[kind] for kind in (annotation, *get_args(annotation)) if kind in _ARROW)
