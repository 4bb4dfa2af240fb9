"""Latency of a trace: time to the first token, between tokens, and what that makes a second."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import Any

import pyarrow.compute as pc

from .stage_sums import loose_spans
from .trace import Trace


@dataclass(frozen=True)
class FirstToken:
    """Where the time to the first token went, in ns, for the call whose TTFT is the (lower) median; adds up to it.

    `tokenize_ns` lies before the first step (only `lifetrace run` sees it); `prepare_ns`,
    `prefill_ns` (inside the model) and `sample_ns` are of the prefill steps; `other_ns` is what is left.
    """

    tokenize_ns: int
    prepare_ns: int
    prefill_ns: int
    sample_ns: int
    other_ns: int


@dataclass(frozen=True)
class Latency:
    """Times in ns; medians over the calls of the trace, percentiles over all gaps between tokens.

    Of two middle calls `ttft_ns` is that of the faster, so that it is the sum of `first_token`.

    Calls whose prefill was cold, and the gaps that a cold step ended, are left out where others remain.
    `ttft_ns`: first token − request start. `tpot_ns`: (last − first) ÷ (N − 1), null for N = 1.
    `decode_tokens_per_s`: all sequences' tokens after their first ÷ (last − first).
    `prefill_tokens_per_s`: prompt tokens (padding left out) ÷ wall time of the prefill steps.
    """

    calls: int
    prompt_tokens: int | None
    new_tokens: int | None
    sequences: int | None
    ttft_ns: float | None
    first_token: FirstToken | None
    tpot_ns: float | None
    itl_p50_ns: float | None
    itl_p90_ns: float | None
    itl_p95_ns: float | None
    itl_p99_ns: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


def latency(trace: Trace, split: bool = True) -> Latency:
    """Compute the latency of a trace over its calls of `generate` that gave tokens.

    Args:
        trace: the trace.
        split: also where the time to the first token went, which takes reading the spans.
    """
    calls = top_calls(trace)
    steps = _notable_steps(trace)
    gaps = sorted(_gaps(trace, {call["call"] for call in calls}, {row["step"] for row in steps if row["warmup"]}))
    warm = warm_calls(trace)
    prefill_ns = _prefill_ns(steps)
    return Latency(
        calls=len(calls),
        prompt_tokens=sum(calls[0]["prompt_tokens"]) if calls else None,
        new_tokens=sum(calls[0]["new_tokens"]) if calls else None,
        sequences=calls[0]["sequences"] if calls else None,
        ttft_ns=median_low([ttft_ns(call) for call in warm]) if warm else None,
        first_token=_first_token(trace, warm, steps) if split else None,
        tpot_ns=_median([value for call in calls if (value := tpot_ns(call)) is not None]),
        itl_p50_ns=percentile(gaps, 0.50),
        itl_p90_ns=percentile(gaps, 0.90),
        itl_p95_ns=percentile(gaps, 0.95),
        itl_p99_ns=percentile(gaps, 0.99),
        prefill_tokens_per_s=_median(
            [
                sum(call["prompt_tokens"]) / prefill_ns[call["call"]] * 1e9
                for call in warm
                if prefill_ns.get(call["call"])
            ]
        ),
        decode_tokens_per_s=_median([value for call in calls if (value := _decode_rate(call)) is not None]),
    )


def top_calls(trace: Trace) -> list[dict[str, Any]]:
    """The calls of `generate` that gave tokens, those inside other calls left out."""
    return [call for call in trace.meta.get("calls") or [] if _gave_tokens(call)]


def warm_calls(trace: Trace) -> list[dict[str, Any]]:
    """Those of the calls whose prefill was not cold; all of them where it was in each."""
    calls = top_calls(trace)
    cold = {row["call"] for row in _notable_steps(trace) if row["warmup"] and row["phase"] == "prefill"}
    return [call for call in calls if call["call"] not in cold] or calls


def ttft_ns(call: dict[str, Any]) -> int:
    """Time to the first token, from the start of the request."""
    return int(call["first_token_ns"] - call["request_start_ns"])


def tpot_ns(call: dict[str, Any]) -> float | None:
    """Time per output token after the first, of the call's longest sequence."""
    tokens = max(call["new_tokens"])
    return (call["last_token_ns"] - call["first_token_ns"]) / (tokens - 1) if tokens > 1 else None


def percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """Percentile of sorted values with linear interpolation between neighbours; null of nothing."""
    if not ordered:
        return None
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _gave_tokens(call: dict[str, Any]) -> bool:
    known = all(
        call.get(key) is not None
        for key in ("first_token_ns", "last_token_ns", "prompt_tokens", "new_tokens", "request_start_ns")
    )
    return known and call.get("parent_step") is None and max(call["new_tokens"], default=0) > 0


def _decode_rate(call: dict[str, Any]) -> float | None:
    elapsed = call["last_token_ns"] - call["first_token_ns"]
    after_first = sum(max(count - 1, 0) for count in call["new_tokens"])
    return after_first / elapsed * 1e9 if elapsed > 0 else None


def _first_token(trace: Trace, calls: list[dict[str, Any]], steps: list[dict[str, Any]]) -> FirstToken | None:
    """The split of the call of median TTFT; null without calls, or where a time of its steps is missing."""
    if not calls:
        return None
    call = sorted(calls, key=ttft_ns)[(len(calls) - 1) // 2]
    names = ("prepare_ns", "forward_ns", "sample_ns")
    prefill = [row for row in steps if row["call"] == call["call"] and row["phase"] == "prefill"]
    if not prefill or any(row[name] is None for row in prefill for name in names):
        return None
    prepare, forward, sample = (sum(row[name] for row in prefill) for name in names)
    tokenize = _tokenize_ns(trace, call["request_start_ns"], call["first_token_ns"])
    rest = ttft_ns(call) - tokenize - prepare - forward - sample
    return FirstToken(tokenize, prepare, forward, sample, rest)


def _tokenize_ns(trace: Trace, start_ns: int, end_ns: int) -> int:
    """Time of the tokenize spans that began within a request, before its first token."""
    rows = [row for row in loose_spans(trace).to_pylist() if row["stage"] == "tokenize"]
    return sum(row["host_ns"] for row in rows if start_ns <= row["start_ns"] < end_ns)


def _gaps(trace: Trace, calls: set[int], cold: set[int]) -> list[int]:
    """Times between consecutive tokens of the longest sequence of each call, those that cold steps ended left out."""
    arrivals: dict[tuple[int, int], list[tuple[int, bool]]] = {}
    tokens = trace.table("tokens", ["call", "sequence", "kept", "step", "arrival_ns"])
    for call, sequence, kept, step, arrival in zip(*(column.to_pylist() for column in tokens.columns), strict=True):
        if call in calls and kept and arrival is not None:
            arrivals.setdefault((call, sequence), []).append((arrival, step in cold))
    longest: dict[int, list[tuple[int, bool]]] = {}
    for (call, _), times in arrivals.items():
        if len(times) > len(longest.get(call, ())):
            longest[call] = times
    return [
        later - earlier
        for times in longest.values()
        for (earlier, _), (later, is_cold) in pairwise(sorted(times))
        if not is_cold
    ]


def _notable_steps(trace: Trace) -> list[dict[str, Any]]:
    """The top-level steps of prefill, and cold ones: of a long run a few."""
    return trace.once("notable_steps", lambda: _read_notable_steps(trace))


def _read_notable_steps(trace: Trace) -> list[dict[str, Any]]:
    names = ["step", "call", "phase", "parent_step", "warmup", "wall_ns", "prepare_ns", "forward_ns", "sample_ns"]
    steps = trace.table("steps", names)
    notable = pc.or_(pc.equal(steps["phase"], "prefill"), pc.fill_null(steps["warmup"], False))
    rows: list[dict[str, Any]] = steps.filter(pc.and_(pc.is_null(steps["parent_step"]), notable)).to_pylist()
    return rows


def _prefill_ns(steps: list[dict[str, Any]]) -> dict[int, int]:
    """Wall time of the top-level prefill steps of each call."""
    times: dict[int, int] = {}
    for row in steps:
        if row["phase"] == "prefill":
            times[row["call"]] = times.get(row["call"], 0) + row["wall_ns"]
    return times


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
