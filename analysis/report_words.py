"""The words and tables of a report: pure functions from a trace to what the page says."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import blocks, units
from .blocks import Block, StepTimes, numbers
from .breakdown import StageTime, breakdown
from .kv_form import KVForm
from .kv_use import KVUse
from .latency import Latency
from .memory import Memory
from .queries import OWN
from .stage_sums import steps_per_call
from .trace import Trace
from .verdict_view import bound_cell
from .verdicts import Verdicts

STOPPED = {"eos": "end of text", "length": "token limit", "error": "an error", "unknown": "unknown"}
MEMORY_COLORS = {"weights": "compute", "kv": "copy", "activations": "memory", "scores": "launch", "logits": "kernel"}
DEFINITIONS = (
    ("TTFT", "Time to first token: arrival of the first token − request start. Median over the calls."),
    ("TPOT", "Time per output token: (last − first arrival) ÷ (tokens − 1). A dash for a single token."),
    ("p50, p95", "Percentiles of the times between consecutive tokens, over all calls."),
    ("Prefill tokens/s", "Prompt tokens (padding left out) ÷ wall time of the prefill steps."),
    ("Decode tokens/s", "All sequences' tokens after their first ÷ (last arrival − first arrival)."),
    ("Step", "One forward of the model, counted from 0 over the whole trace. Steps are not tokens: chunked "
     "prefill and assisted decoding break that."),
    ("Prefill, decode", "A step is prefill while its call has chosen no token yet; then it is decode."),
    ("Time of a stage", "Host time from its start to its end. Stages and the named gaps add up to the step's "
     "wall time. “Rest of the layers” is a layer's time outside its parts, such as residual adds."),
    ("FLOPs", "Matrix products, convolutions and attention, one multiply-add as 2, only the query–key pairs "
     "that causality and the window let through."),
    ("Bytes", "The least traffic at a stage's boundary: weights, KV read and written, inputs, outputs. Parts "
     "need not add up to their layer. What a cache class copies besides is left out of the roof."),
    ("Ceilings", "What this device reaches at most: the best matrix product in the model's dtype, reading at "
     "the step's working set (weights and KV), and the cost of launching one operator."),
    ("Roof", "The time that the work takes at the ceilings: FLOPs ÷ peak or bytes ÷ bandwidth, the larger. On "
     "CUDA it is compared with the device's time, on a CPU with the host's."),
    ("Lost time", "Measured − roof. What could be won at most without doing less work."),
    ("Bound", "The largest of FLOPs ÷ peak (compute), bytes ÷ bandwidth (memory) and operators × launch cost "
     "(launch); “≈” names a second one within 10 %. Unknown, a dash, where a count or a ceiling is missing."),
    ("Efficiency", "Roof ÷ measured. Above 105 % a ceiling or a count is wrong, marked (!)."),
    ("MFU, MBU", "Model FLOP/s ÷ peak, and bytes that had to move ÷ time ÷ bandwidth."),
    ("Intensity, ridge", "FLOPs ÷ bytes of a stage; peak ÷ bandwidth of the device. Left of the ridge memory "
     "is the roof, right of it compute."),
    ("KV filled, allocated", "Bytes of the positions held in the cache, and bytes of storage kept for them."),
    ("Memory", "Live tensors: the bytes of every tensor alive at the highest moment, followed operator by operator "
     "in an untimed pass. Allocator: what PyTorch's CUDA caching allocator has given out, reserved, and its peak. "
     "Resident: what the system counts for the whole process, libraries included."),
    ("Overhead", "Traced time ÷ untraced time of the same work, alternated."),
    ("A dash", "Not measured, or not known. It is never zero."),
    ("kB, MB, GB", "10³, 10⁶, 10⁹ bytes."),
)  # fmt: skip


@dataclass(frozen=True)
class StageCell:
    """One phase of a stage: its share of the phase, and times of a call (prefill) or of a step (decode).

    `roof_share` is the part of the measured time that its roof accounts for, at most 1; it and the
    times of roof and loss are null where the verdict is unknown.
    """

    share: float
    time_ns: float | None
    roof_ns: float | None
    lost_ns: float | None
    roof_share: float | None
    bound: str
    fault: str | None


@dataclass(frozen=True)
class StageRow:
    """A stage or part, prefill beside decode."""

    block: Block
    prefill: StageCell | None
    decode: StageCell | None


@dataclass(frozen=True)
class MemoryPiece:
    """Bytes of one kind at the highest moment: a key for its colour, words, and its share."""

    key: str
    label: str
    bytes_: int
    share: float


@dataclass(frozen=True)
class ModuleRow:
    """Modules alike in all but the numbers in their names."""

    name: str
    class_name: str
    count: int
    parameters: int | None
    weight_bytes: int | None
    dtype: str
    tied_to: str | None


def visible(text: str) -> str:
    """Show control characters as pictures or names (␀, ␛, [U+202E]); line breaks and tabs are kept.

    The marks that turn the direction of the text around them are named too: isolation keeps them
    from the rest of the page, but not from disguising their own text.
    """
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", _picture, text)


def shown(value: Any) -> Any:
    """What a page shows of a value: of a text no character that steers; markup of our own as it is."""
    return visible(value) if type(value) is str else value


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"


def stage_rows(trace: Trace, verdicts: Verdicts) -> list[StageRow]:
    """Where the time went, in lifecycle order, layers split into their parts where those were recorded."""
    found = breakdown(trace)
    parted = {row.phase for row in found if row.stage == "layer" and row.part is not None}
    cells: dict[str, dict[str, StageTime]] = {}
    for row in found:
        whole = row.part is None and not (row.stage == "layer" and row.phase in parted)
        if whole or (row.stage == "layer" and row.part is not None):
            key = row.stage if row.part in (None, OWN) else str(row.part)
            cells.setdefault(key, {})[row.phase] = row
    per_call = {"prefill": 1.0, "decode": steps_per_call(trace).get("decode", 1.0)}
    return [
        StageRow(
            _named(block, bool(parted)),
            *(_stage_cell(cells[block.key].get(phase), verdicts, per_call[phase]) for phase in per_call),
        )
        for block in blocks.ordered_blocks(set(cells))
    ]


def _stage_cell(row: StageTime | None, verdicts: Verdicts, steps: float) -> StageCell | None:
    """A row of `breakdown` with its verdict, divided among the steps of a call."""
    if row is None:
        return None
    found = verdicts.stage(row.phase, row.stage, row.part)
    judged = found.verdict if found is not None else None

    def each(ns: float | None) -> float | None:
        return None if ns is None or not steps else ns / steps

    return StageCell(
        share=row.share,
        time_ns=each(row.time_ns),
        roof_ns=each(judged.roof_ns) if judged else None,
        lost_ns=each(judged.lost_ns) if judged else None,
        roof_share=min(judged.efficiency, 1.0) if judged and judged.efficiency is not None else None,
        bound=bound_cell(found),
        fault=judged.fault if judged else None,
    )


def where_sentences(numbers_: Latency, times: StepTimes, rows: list[StageRow]) -> dict[str, str]:
    """Where prefill and decode went, in a plain sentence each."""
    found = {}
    prefill = times.wall_ns[times.prefill & times.counted]
    decode = times.wall_ns[~times.prefill & times.counted]
    if len(prefill):
        calls = len(np.unique(times.call[times.prefill & times.counted]))
        of = f" of {plural(numbers_.prompt_tokens, 'prompt token')}" if numbers_.prompt_tokens is not None else ""
        took = units.time(float(prefill.sum()) / calls)
        where = _where([(row.block.label, row.prefill) for row in rows])
        found["prefill"] = f"Prefill{of} took {took}{where}"
    if len(decode):
        middle = units.time(float(np.median(decode)))
        what = f"Each of {len(decode):,} decode steps took" if len(decode) > 1 else "The one decode step took"
        where = _where([(row.block.label, row.decode) for row in rows])
        found["decode"] = f"{what} {middle} (median){where}"
    return found


def memory_pieces(found: Memory | None) -> list[MemoryPiece]:
    """What the highest moment of live tensors was made of, kind by kind, largest first."""
    if found is None:
        return []
    return [
        MemoryPiece(MEMORY_COLORS.get(kind, "rest"), visible(kind.replace("_", " ")), size, size / found.peak_bytes)
        for kind, size in found.by_kind().items()
        if size
    ]


def kv_sentence(trace: Trace, form: KVForm | None) -> str:
    """What a position of the cache takes, by the config, and whether the measured cache agrees."""
    if form is None:
        return "Positions filled, and storage held for them."
    text = (
        f"2 (keys and values) × {plural(form.layers, 'layer')} × {plural(form.heads, 'head')} × "
        f"{form.width:,} numbers × {form.item_bytes} B = {form.position_bytes:,} B for each position."
    )
    measured = numbers(blocks.step_rows(trace), "kv_bytes")
    expected = form.bytes_after(trace)
    both = ~np.isnan(measured) & ~np.isnan(expected)
    apart = int((measured[both] != expected[both]).sum())
    if not both.any():
        return text
    if apart:
        return f"{text} The cache held something else after {apart:,} of {plural(int(both.sum()), 'step')}."
    return f"{text} The cache held exactly that after every step."


def kv_use_sentence(use: KVUse | None) -> str:
    """What of the cache is free, padding, or moved besides; nothing where there is none of it."""
    if use is None:
        return ""
    parts = []
    if use.unused_bytes:
        parts.append(f"{units.byte_count(use.unused_bytes)} of its storage holds no position")
    if use.padding_share:
        parts.append(f"{units.share(use.padding_share)} of what it holds is padding")
    if use.copied_bytes:
        copied = f"over a call it moves {units.byte_count(use.copied_bytes)} besides, re-copying itself at each append"
        twice = f", and holds a layer of {units.byte_count(use.double_bytes)} twice for a moment"
        parts.append(copied + (twice if use.double_bytes else ""))
    return f" At the end {'; '.join(parts)}." if parts else ""


def module_rows(trace: Trace) -> list[ModuleRow]:
    """Modules with parameters, those whose names differ only in numbers counted together."""
    columns = ["module", "class_name", "parameters", "weight_bytes", "dtype", "tied_to"]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in trace.table("modules").select(columns).to_pylist():
        name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row["module"] or "")
        groups.setdefault((name, row["class_name"], row["dtype"], row["tied_to"]), []).append(row)
    return [
        ModuleRow(
            name=visible(name),
            class_name=visible(class_name or ""),
            count=len(rows),
            parameters=_total(row["parameters"] for row in rows),
            weight_bytes=_total(row["weight_bytes"] for row in rows),
            dtype=dtype or "",
            tied_to=visible(tied_to) if tied_to else None,
        )
        for (name, class_name, dtype, tied_to), rows in groups.items()
    ]


def stop_word(reason: str) -> str:
    """Put a stop reason of the manifest into words."""
    if reason.startswith("criterion"):
        return visible(reason.removeprefix("criterion").strip() or "a stopping criterion")
    return STOPPED.get(reason, visible(reason))


def _where(cells: list[tuple[str, StageCell | None]]) -> str:
    """`: 54% MLP, 24% attention.` of the shares worth naming, largest first."""
    largest = sorted((c.share, label) for label, c in cells if c is not None and c.share >= 0.05)[:-4:-1]
    return ": " + ", ".join(f"{share:.0%} {label}" for share, label in largest) + "." if largest else "."


def _named(block: Block, parted: bool) -> Block:
    """A layer whose parts were not recorded is no rest of anything."""
    return block if parted or block.key != "layer" else Block(block.key, "decoder layers", block.color)


def environment(trace: Trace) -> list[tuple[str, str]]:
    """The manifest's plain facts, flattened; the prompt, output and calls are shown elsewhere."""
    shown = {key: trace.meta.get(key) for key in ("run_id", "command", "created", "status", "device", "versions")}
    shown |= {key: trace.meta.get(key) for key in ("model", "settings", "generation", "ceilings", "overhead")}
    return [(visible(name), visible(value)) for name, value in _flat(shown, "")]


def _flat(value: Any, name: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif value is not None and value != []:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def layer_count(trace: Trace) -> int:
    """Layers of the model by the manifest, else those that were seen."""
    stored = (trace.meta.get("model") or {}).get("layers")
    if isinstance(stored, int):
        return stored
    return len(blocks.layer_times(trace)[1])


def plural(count: int | None, noun: str) -> str:
    """A number with its noun, in the plural where that is due."""
    return f"{units.count(count)} {noun}" + ("" if count == 1 else "s")


def _total(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
