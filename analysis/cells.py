"""Work and verdict of each block in each step, and the efficiency of each layer: what pictures colour by."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from .blocks import SPAN_BYTES, Array, layer_grid, numbers, step_rows
from .ceilings import Ceilings
from .roofline import COMPUTE, LAUNCH, MEMORY, UNKNOWN, model_dtype, verdict
from .trace import Trace

BOUNDS = (UNKNOWN, COMPUTE, MEMORY, LAUNCH)


@dataclass(frozen=True)
class CellVerdicts:
    """A value a cell: code of the bound in `BOUNDS`, of the bound near to it, and the roof in ns (NaN: unknown).

    `efficiency` is roof ÷ measured.
    """

    bound: Array
    close_to: Array
    roof_ns: Array
    efficiency: Array


def cell_sum(table: pa.Table, name: str, cell: Array, size: int) -> Array:
    """Sum of a column over the spans of each cell; NaN where none ran or one is not known."""
    ran = np.bincount(cell, minlength=size + 1)[:size] > 0
    total = np.bincount(cell, weights=numbers(table, name), minlength=size + 1)[:size]
    return np.where(ran, total, np.nan)


def cell_verdicts(
    trace: Trace, table: pa.Table, cell: Array, sets: Array, columns: int, ceilings: Ceilings | None
) -> CellVerdicts | None:
    """Judge each block of each step; null without ceilings.

    Args:
        trace: for its dtype.
        table: the spans, of which each belongs to the cell step × `columns` + block.
        cell: of each span; one past the last for what is no block's.
        sets: bytes that each step goes through, as `working_sets` has them.
        columns: blocks of a step.
        ceilings: of the device.
    """
    if ceilings is None:
        return None
    sizes = np.repeat(sets, columns)
    count = len(sizes)
    sums = {name: cell_sum(table, name, cell, count) for name in ("flops", "op_count", "host_ns", "device_ns")}
    moved = np.sum([cell_sum(table, name, cell, count) for name in SPAN_BYTES], axis=0)
    measured = np.where(np.isnan(sums["device_ns"]), sums["host_ns"], sums["device_ns"])
    starved = cell_sum(table, "starved", cell, count)
    spans = np.bincount(cell, minlength=count + 1)[:count]
    dtype = model_dtype(trace)
    found = CellVerdicts(
        np.zeros(count, np.int8), np.zeros(count, np.int8), np.full(count, np.nan), np.full(count, np.nan)
    )
    for i in np.flatnonzero(spans):
        share = _known(starved[i] / spans[i])
        work = (_known(sums["flops"][i]), _known(moved[i]), _known(sums["op_count"][i]), _known(measured[i]))
        judged = verdict(*work, ceilings, dtype, _known(sizes[i]), share)
        found.bound[i] = BOUNDS.index(judged.bound)
        found.close_to[i] = BOUNDS.index(judged.close_to or UNKNOWN)
        found.roof_ns[i] = np.nan if judged.roof_ns is None else judged.roof_ns
        found.efficiency[i] = np.nan if judged.efficiency is None else judged.efficiency
    return found


def working_sets(trace: Trace) -> Array:
    """Bytes that each top-level step goes through: weights that it reads and KV that it holds; NaN unknown."""
    steps = step_rows(trace)
    weights = numbers(steps, "weight_bytes")
    whole = (trace.meta.get("model") or {}).get("weight_bytes")
    weights = np.where(np.isnan(weights), np.nan if whole is None else whole, weights)
    return weights + np.nan_to_num(numbers(steps, "kv_bytes"))


def layer_efficiency(trace: Trace, ceilings: Ceilings | None) -> Array:
    """Roof ÷ measured of each layer in each step, as `layer_times` arranges them; NaN where it is not known."""
    grid = layer_grid(trace)
    spans = grid.spans
    host, device = numbers(spans, "host_ns"), numbers(spans, "device_ns")
    measured = grid.add_up(np.where(np.isnan(device), host, device))
    flops = grid.add_up(numbers(spans, "flops"))
    moved = grid.add_up(np.sum([numbers(spans, name) for name in SPAN_BYTES], axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _roofs(trace, grid.steps, flops, moved, ceilings) / np.where(measured > 0, measured, np.nan)


def _roofs(trace: Trace, steps: Array, flops: Array, moved: Array, ceilings: Ceilings | None) -> Array:
    """The larger of compute and memory time in ns, a column a step; NaN where one is not known."""
    peak = ceilings.peak_flops_per_s(model_dtype(trace)) if ceilings else None
    known = dict(zip(step_rows(trace)["step"].to_pylist(), working_sets(trace), strict=True))
    rates = [ceilings.read_bytes_per_s(_known(known[step])) if ceilings else None for step in steps.tolist()]
    compute = flops / (np.nan if peak is None else peak) * 1e9
    memory = moved / np.array(rates, dtype=np.float64) * 1e9
    return np.maximum(compute, memory)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
