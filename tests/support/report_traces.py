"""Traces for the report: small ones with round times, hostile and odd ones, and long ones built by column."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fake_device import fake_ceilings

from lifetrace.analysis import read_trace, schema
from lifetrace.analysis.trace import Trace

MS = 1_000_000
HOSTILE = '</script><img src=x onerror="document.title=1"><b>\u202eRTL\u2028\x00\x1b</b>'


def write_trace(folder: Path, meta: dict, **tables: list[dict] | pa.Table) -> Trace:
    """Write rows as a trace; what a row leaves out is null."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"format_version": 1, "run_id": "r", "status": "complete"} | meta))
    for name, rows in tables.items():
        table = schema.TABLES[name]
        if isinstance(rows, list):
            full = [{column.name: row.get(column.name) for column in table.columns} for row in rows]
            rows = pa.Table.from_pylist(full, schema=table.schema)
        file = folder / name / "part-00000.parquet" if table.in_parts else folder / f"{name}.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(rows, file)
    return read_trace(folder)


def call_facts(call: int, prompt: int, new: int, first_step_ms: float, stop: str | None = "length") -> dict:
    start = int(first_step_ms * MS)
    return {
        "call": call, "kind": "generate", "repeat": call, "parent_step": None, "request_start_ns": start,
        "sequences": 1, "prompt_tokens": [prompt], "new_tokens": [new], "stop_reason": stop,
        "stop_reasons": [stop], "first_token_ns": start + 20 * MS, "last_token_ns": start + (20 + 10 * (new - 1)) * MS,
    }  # fmt: skip


def rows_of_call(call: int = 0, prompt: int = 3, new: int = 4, texts: list[str] | None = None) -> dict[str, list]:
    """Steps of 20 ms (prefill) and 10 ms, each with two layers of attention and MLP; and their tokens."""
    steps: list[dict] = []
    spans: list[dict] = []
    tokens: list[dict] = []
    words = texts or [f" w{i}" for i in range(prompt + new)]
    token = {"rank": 0, "call": call, "sequence": 0, "kept": True, "is_special": False}
    tokens += [
        token | {"step": call * new, "position": i, "token_id": i, "text": words[i], "source": "prompt"}
        for i in range(prompt)
    ]
    base = call * 1000
    for index in range(new):
        number, phase = call * new + index, "decode" if index else "prefill"
        start, wall = (base + 10 * index + 10 if index else base), 10 if index else 20
        common = {"rank": 0, "call": call, "step": number, "phase": phase}
        steps.append(common | {
            "repeat": call, "batch": 1, "q_len": 1 if index else prompt, "start_ns": start * MS,
            "kv_len_before": prompt + index - 1 if index else 0, "kv_len_after": prompt + index,
            "wall_ns": wall * MS, "forward_ns": (wall - 1) * MS, "prepare_ns": 0, "sample_ns": MS,
            "kv_bytes": 1000 * (prompt + index), "kv_allocated_bytes": 2000 * (prompt + index),
            "warmup": False, "discarded": False,
        })  # fmt: skip
        spans += spans_of_step(common, start, wall)
        position = prompt + index
        tokens.append(token | {
            "step": number, "position": position, "token_id": position, "text": words[position],
            "source": "generated", "arrival_ns": (start + wall) * MS,
        })  # fmt: skip
    return {"steps": steps, "spans": spans, "tokens": tokens}


def spans_of_step(common: dict, start: float, wall: float) -> list[dict]:
    layer = (wall - 3) / 2
    base = common["step"] * 100
    row = {key: common[key] for key in ("rank", "step", "phase")}
    parts = [("embed", None, None, None, start, 1.0), ("lm_head", None, None, None, start + wall - 2, 1.0)]
    parts += [("sample", None, None, None, start + wall - 1, 1.0)]
    for i in range(2):
        at, number = start + 1 + i * layer, base + len(parts)
        parts.append(("layer", i, None, None, at, layer))
        parts.append(("layer", i, "attention", number, at, layer / 2))
        parts.append(("layer", i, "mlp", number, at + layer / 2, layer / 2))
    return [
        row | {
            "span": base + n, "parent": parent, "stage": stage, "layer": i, "part": part,
            "module": f"model.{stage}", "start_ns": int(at * MS), "host_ns": int(ms * MS),
        }
        for n, (stage, i, part, parent, at, ms) in enumerate(parts)
    ]  # fmt: skip


def small(folder: Path, **meta) -> Trace:
    return write_trace(
        folder, {"calls": [call_facts(0, 3, 4, 0)], "model": {"id": "m", "layers": 2}} | meta, **rows_of_call()
    )


def judged(folder: Path) -> Trace:
    """The small trace with counted work, on a device of 1,000 FLOP a ns and 100 B a ns, 1 µs an operator.

    Each attention moves 50 MB (0.5 ms) for 0.1 GFLOP (0.1 ms), each MLP 10 MB (0.1 ms) for 1 GFLOP (1 ms): in a
    decode step two of 1.75 ms each, so attention is memory-bound at 1 ÷ 3.5 and the MLP compute-bound at 2 ÷ 3.5.
    Embedding, head and sampling count no FLOPs and no bytes.
    """
    rows = rows_of_call()
    work = {"attention": (100_000_000, 50_000_000), "mlp": (1_000_000_000, 10_000_000)}
    nothing = {"kv_read_bytes": 0, "kv_write_bytes": 0, "kv_copy_bytes": 0, "input_bytes": 0, "output_bytes": 0}
    for row in rows["spans"]:
        flops, moved = work.get(row["part"], (1_100_000_000, 60_000_000) if row["stage"] == "layer" else (0, 0))
        row |= nothing | {"flops": flops, "flops_dense": flops, "weight_bytes": moved, "op_count": 10}
    for row in rows["steps"]:
        row |= nothing | {"flops": 2_200_000_000, "weight_bytes": 120_000_000, "activation_bytes": 0, "op_count": 60}
        row |= {"tokens_processed": row["q_len"], "rss_bytes": 900_000_000}
    kv = [
        {"rank": 0, "step": step, "layer": layer, "kind": "full", "length": 3 + step, "dtype": "float16"}
        for step in range(4) for layer in range(2)
    ]  # fmt: skip
    # 2 × 2 layers × 5 heads × 25 wide × 2 B are the 1,000 B a position that the rows hold
    config = {"num_key_value_heads": 5, "num_attention_heads": 10, "head_dim": 25}
    model = {
        "id": "m",
        "layers": 2,
        "dtype": "float32",
        "attention": "sdpa",
        "weight_bytes": 120_000_000,
        "config": config,
    }
    overhead = {
        "untraced_s": [1.0, 1.02], "traced_s": [1.01, 1.03], "ratio": 1.01, "ratio_low": 1.0, "ratio_high": 1.02,
        "noise": 1.02, "tokens_identical": True,
    }  # fmt: skip
    meta = {
        "calls": [call_facts(0, 3, 4, 0)], "model": model, "ceilings": fake_ceilings().to_json(), "overhead": overhead,
        "device": {"type": "cpu", "name": "fake", "threads": 1},
    }  # fmt: skip
    return write_trace(folder, meta, kv=kv, **rows)


def hostile(folder: Path) -> Trace:
    words = [HOSTILE, "caf", "\ufffd", "\ufffd\ufffd", "\n", HOSTILE, "עברית"]
    rows = rows_of_call(texts=words)
    for row in rows["spans"]:
        row["module"] = HOSTILE
    meta = {
        "model": {"id": HOSTILE, "dtype": HOSTILE, "layers": 2}, "prompt": [HOSTILE, "\ud83d lone"],
        "output": [HOSTILE * 30], "notes": [HOSTILE], "error": HOSTILE, "command": HOSTILE,
        "calls": [call_facts(0, 3, 4, 0, f"criterion {HOSTILE}")], "versions": {HOSTILE: HOSTILE},
        "uncounted": [{"module": HOSTILE, "operators": [HOSTILE], "span": HOSTILE, "share_of_time": 0.5}],
    }  # fmt: skip
    modules = [{"module": HOSTILE, "class_name": HOSTILE, "parameters": 1}]
    return write_trace(folder, meta, modules=modules, **rows)


def odd_traces(folder: Path) -> dict[str, Trace]:
    """Traces that lack something, by name."""
    whole = rows_of_call()
    meta = {"calls": [call_facts(0, 3, 4, 0)], "model": {"id": "m", "layers": 2}}
    layers = [row for row in whole["spans"] if row["part"] is None]
    prefill = {name: [row for row in rows if row["step"] == 0] for name, rows in whole.items()}
    many = [rows_of_call(call) for call in range(9)]
    cases: dict[str, tuple[dict, dict]] = {
        "no steps": ({}, {}),
        "no tokens": (meta, whole | {"tokens": []}),
        "no text": (meta, whole | {"tokens": [row | {"text": None} for row in whole["tokens"]]}),
        "no spans": (meta, whole | {"spans": []}),
        "whole layers only": (meta, whole | {"spans": layers}),
        "every second step": (meta, whole | {"spans": [row for row in whole["spans"] if row["step"] % 2 == 0]}),
        "prefill only": ({"calls": [call_facts(0, 3, 1, 0)]}, prefill),
        "one plain forward": ({"calls": [{"call": 0, "kind": "forward"}]}, prefill | {"tokens": []}),
        "empty generation": (
            {"calls": [call_facts(0, 3, 0, 0, None)]},
            {"tokens": [row for row in whole["tokens"] if row["source"] == "prompt"]},
        ),
        "nothing counted": (
            meta | {"ceilings": fake_ceilings().to_json(), "model": {"id": "m", "dtype": "float32"}},
            whole,
        ),
        "killed": ({"status": "running", "calls": []}, whole | {"tokens": []}),
        "many calls": (
            {"calls": [call_facts(call, 3, 4, 1000 * call) for call in range(9)]},
            {name: [row for rows in many for row in rows[name]] for name in whole},
        ),
    }
    return {
        name: write_trace(folder / name.replace(" ", "-"), facts, **tables) for name, (facts, tables) in cases.items()
    }


def long_trace(folder: Path, steps: int, layers: int) -> Trace:
    """A long run at block detail, built by column."""
    per_step = 4 + 6 * layers
    rng = np.random.default_rng(0)
    wall = per_step * 100_000
    number = np.arange(steps * per_step)
    inside = number % per_step
    place = (inside - 2) % 6
    layered = (inside >= 2) & (inside < per_step - 2)
    child = layered & (place >= 1) & (place <= 4)
    stage = np.where(layered, np.where(place == 5, "other", "layer"), "lm_head")
    part = np.array(["", "norm", "attention", "norm", "mlp", ""])[place]
    columns = {
        "rank": np.zeros(len(number)), "step": number // per_step, "span": number,
        "phase": np.where(number < per_step, "prefill", "decode"),
        "parent": pa.array(number - place, mask=~child), "stage": stage,
        "layer": pa.array((inside - 2) // 6, mask=~layered), "part": pa.array(part, mask=~child),
        "module": np.char.add("model.layers.module.", inside.astype(str)), "start_ns": number * 100_000,
        "host_ns": rng.integers(10_000, 90_000, len(number)), "flops": rng.integers(1, 10**9, len(number)),
    }  # fmt: skip
    spans = pa.table(
        {c.name: pa.array(columns[c.name]).cast(pa.string() if pa.types.is_dictionary(c.type) else c.type).cast(c.type)
         if c.name in columns else pa.nulls(len(number), c.type) for c in schema.SPANS.columns}
    )  # fmt: skip
    rows = [
        {"rank": 0, "call": 0, "step": i, "phase": "decode" if i else "prefill", "start_ns": i * wall,
         "wall_ns": wall, "kv_bytes": i, "kv_len_after": i + 1, "kv_len_before": i, "batch": 1, "q_len": 1}
        for i in range(steps)
    ]  # fmt: skip
    tokens = [
        {"rank": 0, "call": 0, "step": i, "sequence": 0, "position": i, "token_id": i, "text": f" word{i}",
         "source": "generated", "kept": True, "arrival_ns": (i + 1) * wall}
        for i in range(steps)
    ]  # fmt: skip
    return write_trace(folder, {}, steps=rows, spans=spans, tokens=tokens)
