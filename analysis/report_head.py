"""The top of a report: facts, marks of quality, prompt and output, headline numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import blocks, units
from .blocks import numbers
from .ceilings import of_manifest
from .latency import Latency
from .memory import memory
from .report_words import plural, stop_word, visible
from .trace import Trace
from .verdicts import UNSTEADY

STATUS = {
    "running": "What had been written until now is shown.",
    "interrupted": "The run was interrupted: the steps until then are shown.",
    "failed": "The run failed: the steps until then are shown.",
    "oom": "The run ended for want of memory: the steps until then are shown.",
}


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Mark:
    """A statement on the quality of the trace; `kind` is `good`, `bad` or `plain`."""

    kind: str
    text: str


def cards(trace: Trace, numbers_: Latency) -> list[Card]:
    """The headline numbers, a dash where one was not measured."""
    calls = f"median of {numbers_.calls} calls" if numbers_.calls > 1 else "from the request's start"
    spread = f"p50 {units.time(numbers_.itl_p50_ns)}, p95 {units.time(numbers_.itl_p95_ns)}"
    new = plural(numbers_.new_tokens, "new token")
    prompt = plural(numbers_.prompt_tokens, "prompt token")
    return [
        Card("Time to first token", units.time(numbers_.ttft_ns), calls),
        Card("Time per output token", units.time(numbers_.tpot_ns), spread),
        Card("Prefill", units.rate(numbers_.prefill_tokens_per_s, "tokens/s"), prompt),
        Card("Decode", units.rate(numbers_.decode_tokens_per_s, "tokens/s"), f"{new}, batch {_batch(numbers_)}"),
        _memory_card(trace),
        _kv_card(trace),
        _overhead_card(trace.meta.get("overhead")),
        _stop_card(trace),
    ]


def marks(trace: Trace) -> list[Mark]:
    """What a reader should know before trusting the numbers."""
    status = trace.meta.get("status")
    words = STATUS.get(str(status), visible(f"Status: {status}."))
    found = [Mark("bad", words)] if status != "complete" else []
    found += [Mark("bad", f"{gap[0].upper()}{gap[1:]}.") for gap in trace.gaps]
    if trace.meta.get("error"):
        found.append(Mark("bad", visible(str(trace.meta["error"]))))
    found += _baseline_marks(trace.meta.get("overhead") or {})
    ranks = len(np.unique(numbers(trace.table("steps"), "rank")))
    if ranks > 1:
        found.append(Mark("plain", f"{ranks} processes shared the work; the pictures show the first."))
    cold = int(np.nansum(numbers(trace.table("steps"), "warmup")))
    if cold:
        found.append(
            Mark("plain", f"{plural(cold, 'step')} ran cold, over twice as slow as the rest: shown, not counted.")
        )
    found += _count_marks(trace)
    return [*found, *_ceiling_marks(trace)]


def _baseline_marks(overhead: dict[str, Any]) -> list[Mark]:
    """Whether untraced runs were compared, gave the same tokens, and how much equal ones differ."""
    if not overhead:
        return [Mark("plain", "No untraced run was made to compare with.")]
    found = []
    if overhead.get("tokens_identical") is True:
        found.append(Mark("good", "Tokens are identical with and without tracing."))
    elif overhead.get("tokens_identical") is False:
        found.append(Mark("bad", "Tokens differ with and without tracing."))
    pairs, noise = len(overhead.get("untraced_s") or []), overhead.get("noise")
    if noise is not None and pairs > 1:
        quiet = noise <= UNSTEADY
        doubt = "" if quiet else ", doubt the times"
        found.append(Mark("good" if quiet else "bad", f"{pairs} equal untraced runs differ by {noise - 1:.1%}{doubt}."))
    return found


def _count_marks(trace: Trace) -> list[Mark]:
    """Whether all work was counted, and if not the share of time and the modules that were not."""
    if trace.meta.get("uncounted"):
        share = uncounted_share(trace.meta["uncounted"])
        took = f", {share:.1%} of the time" if share is not None else ""
        return [Mark("plain", f"No formula for the work of some modules{took}: " + _uncounted(trace.meta["uncounted"]))]
    flops = numbers(blocks.step_rows(trace), "flops")
    if not len(flops):
        return []
    missing = int(np.isnan(flops).sum())
    if missing:
        return [Mark("plain", f"The work of {missing:,} of {plural(len(flops), 'step')} was not counted.")]
    return [Mark("good", "All FLOPs are counted.")]


def uncounted_share(modules: list[Any]) -> float | None:
    """Share of the recorded time of the spans that hold uncounted modules; null where none is known."""
    by_span = {item.get("span"): item.get("share_of_time") for item in modules if isinstance(item, dict)}
    shares = [share for share in by_span.values() if share is not None]
    return min(float(sum(shares)), 1.0) if shares else None


def _ceiling_marks(trace: Trace) -> list[Mark]:
    ceilings, note = of_manifest(trace.meta)
    if ceilings is None:
        why = visible(note or "no ceilings are known for this device")
        return [Mark("plain", f"{why[:1].upper()}{why[1:]}.")]
    if ceilings.quietness is not None and not ceilings.quietness.quiet:
        return [Mark("bad", "The machine was not quiet when its ceilings were measured: they may be too low.")]
    return [Mark("good" if ceilings.measured else "plain", f"Ceilings: {visible(ceilings.source)}.")]


def _kv_card(trace: Trace) -> Card:
    steps = blocks.step_rows(trace)
    filled, held = numbers(steps, "kv_bytes"), numbers(steps, "kv_allocated_bytes")
    if not len(steps) or np.isnan(filled).all():
        return Card("KV cache", units.NONE, "not seen")
    most = int(np.nanargmax(filled))
    positions = numbers(steps, "kv_len_after")[most]
    note = "at its largest" if np.isnan(positions) else f"at {plural(int(positions), 'position')}"
    if held[most] > filled[most]:
        note += f", {units.byte_count(held[most])} allocated"
    return Card("KV cache", units.byte_count(filled[most]), note)


def _memory_card(trace: Trace) -> Card:
    """The highest moment of live tensors, else the allocator's peak, else resident memory: three different things."""
    found = memory(trace)
    if found is not None:
        return Card("Peak memory", units.byte_count(found.peak_bytes), visible(f"live tensors, at {found.during}"))
    steps = trace.table("steps")
    tensors = "CUDA allocator" if (trace.meta.get("device") or {}).get("type") == "cuda" else "live tensors"
    for name, note in (("mem_peak_bytes", tensors), ("rss_bytes", "resident, the whole process")):
        values = numbers(steps, name)
        if len(values) and not np.isnan(values).all():
            return Card("Peak memory", units.byte_count(float(np.nanmax(values))), note)
    return Card("Peak memory", units.NONE, "not measured")


def _overhead_card(overhead: dict[str, Any] | None) -> Card:
    ratio = (overhead or {}).get("ratio")
    if overhead is None or ratio is None:
        return Card("Tracing overhead", units.NONE, "no untraced run")
    low, high = overhead.get("ratio_low"), overhead.get("ratio_high")
    spread = f"{low - 1:+.1%} to {high - 1:+.1%}" if low is not None and high is not None else "traced ÷ untraced"
    return Card("Tracing overhead", f"{ratio - 1:+.1%}", spread)


def _stop_card(trace: Trace) -> Card:
    reasons = [str(call["stop_reason"]) for call in _measured_calls(trace) if call.get("stop_reason")]
    if not reasons:
        return Card("Stopped by", units.NONE, "not recorded")
    kinds = list(dict.fromkeys(reasons))
    note = f"and {len(kinds) - 1} other reasons" if len(kinds) > 1 else "each call" if len(reasons) > 1 else ""
    return Card("Stopped by", stop_word(kinds[0]), note)


def facts(trace: Trace) -> list[tuple[str, str]]:
    """The line below the title: device, dtype, attention, sizes, versions; what is not known is left out."""
    model, device, versions = (trace.meta.get(key) or {} for key in ("model", "device", "versions"))
    name = " ".join(str(device[key]) for key in ("name", "type") if device.get(key))
    if device.get("threads"):
        name += f", {plural(device['threads'], 'thread')}"
    pairs = [
        ("device", name),
        ("dtype", model.get("dtype")),
        ("attention", model.get("attention")),
        ("layers", model.get("layers")),
        ("parameters", _parameters(model)),
        ("architecture", model.get("architecture")),
        ("detail", (trace.meta.get("settings") or {}).get("detail")),
        *((key, versions.get(key)) for key in ("torch", "transformers", "lifetrace")),
        ("recorded", str(trace.meta.get("created") or "").replace("T", " ")[:16]),
    ]
    return [(label, visible(str(value))) for label, value in pairs if value not in (None, "")]


def _parameters(model: dict[str, Any]) -> str:
    if model.get("parameters") is None:
        return ""
    weights = model.get("weight_bytes")
    of = f" ({units.byte_count(weights)})" if weights is not None else ""
    return f"{_large(model['parameters'])}{of}"


def texts(trace: Trace, key: str) -> list[str]:
    """The prompts or outputs of the manifest, else what the first measured call's tokens spell."""
    stored = trace.meta.get(key)
    if stored:
        return [visible(str(text)) for text in ([stored] if isinstance(stored, str) else stored)]
    tokens = trace.table("tokens").select(["call", "sequence", "position", "text", "source", "kept", "is_special"])
    source = "prompt" if key == "prompt" else "generated"
    first = _first_call(trace)
    spelled: dict[int, list[str]] = {}
    for row in tokens.sort_by([("sequence", "ascending"), ("position", "ascending")]).to_pylist():
        if row["call"] == first and row["source"] == source and row["kept"] is not False and row["text"] is not None:
            spelled.setdefault(row["sequence"], []).append("" if row["is_special"] else row["text"])
    return [visible("".join(parts)) for parts in spelled.values()]


def _first_call(trace: Trace) -> int | None:
    calls = blocks.step_rows(trace)["call"].to_pylist()
    return calls[0] if calls else None


def _measured_calls(trace: Trace) -> list[dict[str, Any]]:
    """Top-level calls of the manifest whose steps count."""
    counted = set(blocks.step_rows(trace)["call"].to_pylist())
    return [c for c in trace.meta.get("calls") or [] if c.get("call") in counted and c.get("parent_step") is None]


def _batch(numbers_: Latency) -> str:
    return units.count(numbers_.sequences)


def _large(count: int | None) -> str:
    if count is None:
        return units.NONE
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{units.significant(count / scale, 4)} {unit}"
    return str(count)


def _uncounted(modules: Any) -> str:
    names = [str(item.get("module", item)) if isinstance(item, dict) else str(item) for item in modules]
    return visible(", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") + ".")
