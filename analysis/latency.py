"""Latency of a trace: time to the first token, between tokens, and what that makes a second."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from .trace import Trace


@dataclass(frozen=True)
class Latency:
    """Times in ns; medians over the calls of the trace, percentiles over all gaps between tokens.

    `ttft_ns`: first token − request start. `tpot_ns`: (last − first) ÷ (N − 1), null for N = 1.
    `decode_tokens_per_s`: all sequences' tokens after their first ÷ (last − first).
    `prefill_tokens_per_s`: prompt tokens (padding left out) ÷ wall time of the prefill steps.
    """

    calls: int
    prompt_tokens: int | None
    new_tokens: int | None
    sequences: int | None
    ttft_ns: float | None
    tpot_ns: float | None
    itl_p50_ns: float | None
    itl_p90_ns: float | None
    itl_p95_ns: float | None
    itl_p99_ns: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


def latency(trace: Trace) -> Latency:
    """Compute the latency of a trace over its calls of `generate` that gave tokens."""
    calls = [call for call in trace.meta.get("calls") or [] if _gave_tokens(call)]
    gaps = sorted(_gaps(trace, {call["call"] for call in calls}))
    prefill_ns = _prefill_ns(trace)
    return Latency(
        calls=len(calls),
        prompt_tokens=sum(calls[0]["prompt_tokens"]) if calls else None,
        new_tokens=sum(calls[0]["new_tokens"]) if calls else None,
        sequences=calls[0]["sequences"] if calls else None,
        ttft_ns=_median([call["first_token_ns"] - call["request_start_ns"] for call in calls]),
        tpot_ns=_median([value for call in calls if (value := tpot_ns(call)) is not None]),
        itl_p50_ns=percentile(gaps, 0.50),
        itl_p90_ns=percentile(gaps, 0.90),
        itl_p95_ns=percentile(gaps, 0.95),
        itl_p99_ns=percentile(gaps, 0.99),
        prefill_tokens_per_s=_median(
            [
                sum(call["prompt_tokens"]) / prefill_ns[call["call"]] * 1e9
                for call in calls
                if prefill_ns.get(call["call"])
            ]
        ),
        decode_tokens_per_s=_median([value for call in calls if (value := _decode_rate(call)) is not None]),
    )


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
        call.get(key) is not None for key in ("first_token_ns", "last_token_ns", "new_tokens", "request_start_ns")
    )
    return known and call.get("parent_step") is None and max(call["new_tokens"], default=0) > 0


def _decode_rate(call: dict[str, Any]) -> float | None:
    elapsed = call["last_token_ns"] - call["first_token_ns"]
    after_first = sum(max(count - 1, 0) for count in call["new_tokens"])
    return after_first / elapsed * 1e9 if elapsed > 0 else None


def _gaps(trace: Trace, calls: set[int]) -> list[int]:
    """Times between consecutive tokens of the longest sequence of each call."""
    arrivals: dict[tuple[int, int], list[int]] = {}
    tokens = trace.table("tokens").select(["call", "sequence", "kept", "arrival_ns"])
    for call, sequence, kept, arrival in zip(*(column.to_pylist() for column in tokens.columns), strict=True):
        if call in calls and kept and arrival is not None:
            arrivals.setdefault((call, sequence), []).append(arrival)
    longest: dict[int, list[int]] = {}
    for (call, _), times in arrivals.items():
        if len(times) > len(longest.get(call, ())):
            longest[call] = times
    return [later - earlier for times in longest.values() for earlier, later in pairwise(sorted(times))]


def _prefill_ns(trace: Trace) -> dict[int, int]:
    """Wall time of the top-level prefill steps of each call."""
    times: dict[int, int] = {}
    steps = trace.table("steps").select(["call", "phase", "parent_step", "wall_ns"])
    for call, phase, parent, wall_ns in zip(*(column.to_pylist() for column in steps.columns), strict=True):
        if phase == "prefill" and parent is None:
            times[call] = times.get(call, 0) + wall_ns
    return times


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
