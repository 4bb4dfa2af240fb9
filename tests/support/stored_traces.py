"""Small traces with known numbers, written with the schema alone: what a reader gets from a stranger."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lifetrace.analysis import schema

MS = 1_000_000


def write_trace(path: Path, tables: dict[str, list[dict]], **manifest) -> Path:
    """Write rows given as dictionaries; columns that no row names are null."""
    path.mkdir(parents=True, exist_ok=True)
    whole = dict.fromkeys(schema.MANIFEST_KEYS) | {
        "format_version": schema.FORMAT_VERSION,
        "run_id": "r",
        "status": "complete",
        "calls": [],
        "notes": [],
    }
    (path / "run.json").write_text(json.dumps(whole | manifest))
    for name, rows in tables.items():
        table = schema.TABLES[name]
        columns = {c.name: [row.get(c.name) for row in rows] for c in table.columns}
        arrays = [_array(columns[c.name], c.type) for c in table.columns]
        file = path / name / "part-00000.parquet" if table.in_parts else path / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_arrays(arrays, schema=table.schema), file)
    return path


def _array(values: list, type_: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(type_):
        return pa.array(values, type=type_.value_type).dictionary_encode()
    return pa.array(values, type=type_)


def one_call(path: Path) -> Path:
    """A prefill of 3 tokens (10 ms) and three decode steps (4, 5 and 6 ms), two layers.

    Prefill: prepare 1, embed 1, layers 3 + 3 (attention 1 each, MLP 1 each), sample 2.
    Decode step of n ms: layers 1 + 1, sample n − 2.
    """
    steps, spans = [], []
    start = 0
    for step, (phase, wall) in enumerate([("prefill", 10), ("decode", 4), ("decode", 5), ("decode", 6)]):
        steps.append(
            {
                "call": 0, "repeat": 0, "step": step, "phase": phase, "role": "main", "warmup": False,
                "discarded": False, "start_ns": start * MS, "wall_ns": wall * MS, "kv_len_after": 3 + step,
                "kv_bytes": (3 + step) * 100, "kv_allocated_bytes": (3 + step) * 100, "token_count": 1,
            }
        )  # fmt: skip
        stages = [("prepare", None, 1), ("embed", None, 1), ("layer", 0, 3), ("layer", 1, 3), ("sample", None, 2)]
        if phase == "decode":
            stages = [("layer", 0, 1), ("layer", 1, 1), ("sample", None, wall - 2)]
        at = start
        for stage, layer, length in stages:
            span = _span(spans, step, phase, None, stage, layer, None, at, length)
            if stage == "layer" and phase == "prefill":
                _span(spans, step, phase, span, stage, layer, "attention", at, 1)
                _span(spans, step, phase, span, stage, layer, "mlp", at + 2, 1)
            at += length
        start += wall
    tokens = [
        {"call": 0, "step": max(p - 3, 0), "sequence": 0, "position": p, "token_id": p, "text": f"t{p}",
         "source": "prompt" if p < 3 else "generated", "kept": True, "is_special": False,
         "arrival_ns": None if p < 3 else [10, 14, 19, 25][p - 3] * MS}
        for p in range(7)
    ]  # fmt: skip
    call = {
        "call": 0, "kind": "generate", "repeat": 0, "parent_step": None, "request_start_ns": 0, "start_ns": 0,
        "end_ns": 25 * MS, "error": None, "sequences": 1, "prompt_tokens": [3], "new_tokens": [4],
        "stop_reason": "length", "stop_reasons": ["length"], "first_token_ns": 10 * MS, "last_token_ns": 25 * MS,
    }  # fmt: skip
    return write_trace(path, {"steps": steps, "spans": spans, "tokens": tokens}, calls=[call])


def _span(spans, step, phase, parent, stage, layer, part, at_ms, length_ms):
    number = len(spans)
    spans.append(
        {
            "step": step, "phase": phase, "span": number, "parent": parent, "stage": stage, "layer": layer,
            "part": part, "start_ns": at_ms * MS, "host_ns": length_ms * MS,
        }
    )  # fmt: skip
    return number
