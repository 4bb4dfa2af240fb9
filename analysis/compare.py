"""Two runs side by side: what was different, what took longer beyond the noise, and where the time moved."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import noise, queries
from .blocks import first_rank
from .latency import top_calls, tpot_ns, ttft_ns, warm_calls
from .noise import Difference, Values
from .schema import PHASES
from .stage_sums import places_of, step_stages
from .trace import Trace

# What decides whether runs do the same work; each with what it makes incomparable.
EVERYTHING, PREFILL = "everything", "prefill"
CAUSE_SHARE = 0.5
NOTABLE = 0.02  # of its phase: a stage below is not judged by itself


@dataclass(frozen=True)
class Change:
    """One thing that the runs were told, found or ran on, and that is not the same in both."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Row:
    """One quantity of both sides; `unit` is `ns` or `bytes`. `share` is the first side's part of its phase."""

    name: str
    phase: str | None
    stage: str | None
    part: str | None
    unit: str
    share: float | None
    difference: Difference


@dataclass(frozen=True)
class Cause:
    """Where most of a phase's change came from: `share` of it, in one layer (null: in all) and one part."""

    phase: str
    stage: str
    layer: int | None
    part: str | None
    delta_ns: float
    share: float


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `refused` says what cannot be compared, and why; its rows are left out."""

    first: str
    second: str
    calls: tuple[int, int]
    changes: list[Change]
    refused: list[str]
    headline: list[Row]
    stages: list[Row]
    causes: list[Cause]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        whole = asdict(self) | {"calls": list(self.calls)}
        for rows, plain in ((self.headline, whole["headline"]), (self.stages, whole["stages"])):
            for row, document in zip(rows, plain, strict=True):
                found = row.difference
                document["difference"] |= {
                    "delta": found.delta,
                    "change": found.change,
                    "beyond_noise": found.beyond_noise,
                }
        return whole


def compare(first: Sequence[Trace], second: Sequence[Trace], confidence: float = noise.CONFIDENCE) -> Comparison:
    """Compare two sides, each one trace or several of the same work.

    Args:
        first: the side that the other is measured against.
        second: the other side.
        confidence: with which the bounds hold each difference.
    """
    changes = _changes(first[0], second[0])
    within = [_changes(side[0], other) for side in (first, second) for other in side[1:]]
    hindrances = {what: why for found in (*within, changes) for what, why in _hindrances(found)}
    sides = _Side.of(first), _Side.of(second)
    phases = [
        phase for phase in PHASES if EVERYTHING not in hindrances and not (phase == PREFILL and PREFILL in hindrances)
    ]
    headline = _headline(*sides, phases, confidence)
    stages = [row for phase in phases for row in _stage_rows(*sides, phase, confidence)]
    return Comparison(
        first=_names(first),
        second=_names(second),
        calls=(sides[0].calls, sides[1].calls),
        changes=changes,
        refused=list(hindrances.values()),
        headline=headline,
        stages=stages,
        causes=[cause for phase in _changed(headline) if (cause := _cause(*sides, phase)) is not None],
        notes=_notes(*sides),
    )


def _names(traces: Sequence[Trace]) -> str:
    return ", ".join(str(trace.path) for trace in traces)


def _notes(first: "_Side", second: "_Side") -> list[str]:
    notes = []
    if (few := _too_few(first.calls, second.calls)) is not None:
        notes.append(f"{few}, so how much calls differ by themselves is not known: nothing is judged")
    if first.detail != second.detail:
        notes.append(f"the detail differs ({first.detail}, {second.detail}): parts that one side lacks are left out")
    return notes


def _too_few(*calls: int) -> str | None:
    """What is wrong with sides of so many calls; null where each has two or more."""
    if min(calls) == 0:
        return "a side has no call that gave tokens"
    return "a side has one call alone" if min(calls) == 1 else None


# -- what differs ------------------------------------------------------------------------------


def _facts(trace: Trace) -> dict[str, Any]:
    """What is compared of two manifests, flat."""
    meta = trace.meta
    model, device = meta.get("model") or {}, meta.get("device") or {}
    calls = top_calls(trace)
    facts: dict[str, Any] = {
        f"model {key}": model.get(key) for key in ("id", "revision", "parameters", "layers", "dtype")
    }
    facts |= {"attention": model.get("attention"), "experts": model.get("experts")}
    facts |= {f"device {key}": device.get(key) for key in ("type", "name", "threads")}
    facts |= {f"version of {key}": value for key, value in (meta.get("versions") or {}).items()}
    facts |= {f"generation {key}": value for key, value in (meta.get("generation") or {}).items()}
    if calls:
        facts["prompt tokens"] = sum(calls[0]["prompt_tokens"])
        facts["new tokens"] = sum(calls[0]["new_tokens"])
        facts["sequences"] = calls[0]["sequences"]
    return facts


def _changes(first: Trace, second: Trace) -> list[Change]:
    a, b = _facts(first), _facts(second)
    return [Change(key, a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key)]


def _hindrances(changes: Iterable[Change]) -> Iterable[tuple[str, str]]:
    """What cannot be compared, and the sentence that says so; what is not known of a side hinders nothing."""
    by_key = {change.key: change for change in changes if None not in (change.first, change.second)}
    for key, word in (("model parameters", "model"), ("model layers", "model"), ("sequences", "batch")):
        if key in by_key:
            a, b = by_key[key].first, by_key[key].second
            yield EVERYTHING, f"the runs are of another {word} ({key}: {a} and {b}): their times are not compared"
            return
    if "prompt tokens" in by_key:
        a, b = by_key["prompt tokens"].first, by_key["prompt tokens"].second
        yield PREFILL, f"the prompts have {a} and {b} tokens: prefill and TTFT are not compared, decode is"


# -- sides -------------------------------------------------------------------------------------

_Key = tuple[str, str, str | None]
_LayerKey = tuple[str, str, int | None, str | None]


@dataclass(frozen=True)
class _Side:
    """Times of one side: of its calls, of each stage in them, and of each layer's parts (means over all calls)."""

    calls: int
    detail: str | None
    ttft_ns: list[Values]
    tpot_ns: list[Values]
    phase_ns: dict[str, list[Values]]
    stages: dict[_Key, list[Values]]
    layers: dict[_LayerKey, float]
    peak_bytes: int | None

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "_Side":
        calls = [call for trace in traces for call in top_calls(trace)]
        warm = [call for trace in traces for call in warm_calls(trace)]
        counts = 0
        phases: dict[str, list[Values]] = {}
        stages: dict[_Key, list[Values]] = {}
        layers: dict[_LayerKey, list[float]] = {}
        for trace in traces:
            steps = _counted(trace)
            counts += pc.count_distinct(steps["call"]).as_py()
            times = _stage_times(trace, steps)
            _collect(phases, _series(steps, ["phase"], "wall_ns"))
            _collect(stages, _series(times, ["phase", "stage", "part"], "host_ns"))
            for place, mean in _per_step(places_of(trace, steps), times):
                layers.setdefault(place, []).append(mean)
        tpots = [value for call in calls if (value := tpot_ns(call)) is not None]
        return cls(
            calls=counts,
            detail=(traces[0].meta.get("settings") or {}).get("detail"),
            ttft_ns=[np.array([float(ttft_ns(call))]) for call in warm],
            tpot_ns=[np.array([value]) for value in tpots],
            phase_ns={key[0]: values for key, values in phases.items()},
            stages=stages,
            layers={key: float(np.mean(values)) for key, values in layers.items()},
            peak_bytes=max((peak for trace in traces if (peak := _peak(trace)) is not None), default=None),
        )


def _counted(trace: Trace) -> pa.Table:
    """The top-level steps that statistics count, of calls that gave tokens; of loops by hand where there are none."""
    names = ["step", "call", "phase", "parent_step", "warmup", "discarded", "wall_ns", "kv_len_before"]
    steps = first_rank(trace.table("steps", ["rank", *names])).select(names).sort_by("step")
    steps = steps.set_column(2, "phase", steps["phase"].cast(pa.string())).filter(pc.is_null(steps["parent_step"]))
    known = [call["call"] for call in top_calls(trace)]
    if known:
        steps = steps.filter(pc.is_in(steps["call"].cast(pa.int64()), value_set=pa.array(known, pa.int64())))
    else:
        steps = steps.set_column(1, "call", pa.array(_loops(steps), steps["call"].type))
    left_out = pc.or_(pc.fill_null(steps["warmup"], False), pc.fill_null(steps["discarded"], False))
    return steps.filter(pc.invert(left_out)).select(["step", "call", "phase", "wall_ns"])


def _loops(steps: pa.Table) -> list[int]:
    """Number the loops that a program ran by itself, each forward of which is a call: one begins on an empty cache."""
    pairs = zip(steps["phase"].to_pylist(), steps["kv_len_before"].to_pylist(), strict=True)
    return list(accumulate(int(phase == PREFILL and not cached) for phase, cached in pairs))


def _stage_times(trace: Trace, steps: pa.Table) -> pa.Table:
    """Time of each stage and part in each of those steps, with its call; the longest-named keys are null on none."""
    stages = step_stages(trace)
    stages = first_rank(stages) if "rank" in stages.column_names else stages
    return queries.call_stages(stages, steps, ()).collect("pyarrow").to_native()


def _series(rows: pa.Table, by: list[str], column: str) -> dict[Any, list[Values]]:
    """By key, for each call, the values of its steps; a prefill in several steps counts as one.

    Of a stage as a whole the part in the key is null.
    """
    sums = (
        rows.group_by(["call", "step", *by])
        .aggregate([(column, "sum")])
        .sort_by([("call", "ascending"), ("step", "ascending")])
    )
    found: dict[Any, dict[int, list[float]]] = {}
    columns = (sums[name].to_pylist() for name in ("call", f"{column}_sum", *by))
    for call, value, *key in zip(*columns, strict=True):
        found.setdefault(tuple(word or None for word in key), {}).setdefault(call, []).append(float(value))
    return {
        key: [np.array([sum(values)] if key[0] == PREFILL else values) for values in calls.values()]
        for key, calls in found.items()
    }


def _collect(into: dict[Any, list[Values]], series: dict[Any, list[Values]]) -> None:
    for key, calls in series.items():
        into.setdefault(key, []).extend(calls)


def _per_step(places: list[dict[str, Any]], times: pa.Table) -> Iterable[tuple[_LayerKey, float]]:
    """Mean time in each place of a recorded step, or of a whole prefill: in a layer's parts, else the whole stage."""
    counts = dict(_recorded(times))
    split = {(row["phase"], row["stage"]) for row in places if row["part"]}
    for row in places:
        key = (row["phase"], row["stage"])
        if row["part"] or key not in split:
            layer = row["layer"] if row["layer"] >= 0 else None
            yield (*key, layer, row["part"] or None), row["host_ns"] / counts[row["phase"]]


def _recorded(times: pa.Table) -> Iterable[tuple[str, int]]:
    """How many steps have spans, with `--every` fewer than ran; a prefill in several steps counts as one."""
    for row in times.group_by("phase").aggregate([("step", "count_distinct"), ("call", "count_distinct")]).to_pylist():
        yield row["phase"], row["call_count_distinct" if row["phase"] == PREFILL else "step_count_distinct"]


def _peak(trace: Trace) -> int | None:
    peak: int | None = pc.max(trace.table("steps")["mem_peak_bytes"]).as_py()
    return peak


# -- rows --------------------------------------------------------------------------------------


def _headline(first: _Side, second: _Side, phases: list[str], confidence: float) -> list[Row]:
    rows = []
    if PREFILL in phases and first.ttft_ns and second.ttft_ns:
        rows.append(_row("TTFT", None, None, None, None, noise.difference(first.ttft_ns, second.ttft_ns, confidence)))
    if "decode" in phases and first.tpot_ns and second.tpot_ns:
        rows.append(_row("TPOT", None, None, None, None, noise.difference(first.tpot_ns, second.tpot_ns, confidence)))
    for phase in phases:
        a, b = first.phase_ns.get(phase), second.phase_ns.get(phase)
        if a and b:
            rows.append(_row(f"{phase} step", phase, None, None, 1.0, noise.difference(a, b, confidence)))
    if first.peak_bytes is not None and second.peak_bytes is not None:
        found = noise.exact(first.peak_bytes, second.peak_bytes)
        rows.append(Row("peak memory", None, None, None, "bytes", None, found))
    return rows


def _row(
    name: str, phase: str | None, stage: str | None, part: str | None, share: float | None, found: Difference
) -> Row:
    return Row(name, phase, stage, part, "ns", share, found)


def _stage_rows(first: _Side, second: _Side, phase: str, confidence: float) -> list[Row]:
    """Each stage and part that both sides have, in the first side's order of time, parts below their stage."""
    whole = first.phase_ns.get(phase)
    if not whole:
        return []
    total = float(np.mean([np.median(call) for call in whole]))
    rows = []
    for key in (key for key in first.stages if key[0] == phase and key in second.stages):
        found = noise.difference(first.stages[key], second.stages[key], confidence)
        _, stage, part = key
        name = stage if part is None else f"{stage}, {part}"
        rows.append(_row(name, phase, stage, part, found.first / total if total else None, found))
    size = {row.stage: row.difference.first for row in rows if row.part is None}
    return sorted(
        rows, key=lambda row: (-size.get(row.stage, 0.0), row.stage or "", row.part is not None, -row.difference.first)
    )


def _changed(headline: Iterable[Row]) -> list[str]:
    """The phases whose steps changed beyond the noise."""
    return [row.phase for row in headline if row.phase is not None and row.difference.beyond_noise]


def _cause(first: _Side, second: _Side, phase: str) -> Cause | None:
    """The one place that most of a phase's change comes from: a layer's part, else a part over all layers."""
    keys = [key for key in first.layers if key[0] == phase and key in second.layers]
    deltas = {key: second.layers[key] - first.layers[key] for key in keys}
    total = sum(deltas.values())
    if not deltas or not total:
        return None
    single = max(deltas, key=lambda key: deltas[key] / total)
    over_layers: dict[_LayerKey, float] = {}
    for (_, stage, _, part), delta in deltas.items():
        place = (phase, stage, None, part)
        over_layers[place] = over_layers.get(place, 0.0) + delta
    spread = max(over_layers, key=lambda key: over_layers[key] / total)
    for key, delta in ((single, deltas[single]), (spread, over_layers[spread])):
        if delta / total >= CAUSE_SHARE:
            return Cause(phase, key[1], key[2], key[3], delta, delta / total)
    return None


# -- the gate ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the gate says: rows that got worse by more than allowed, beyond the noise, of so many judged.

    `unjudged` says why the runs could not be judged at all; null where they were.
    """

    regressions: list[Row]
    judged: int
    unjudged: str | None


def gate(first: Sequence[Trace], second: Sequence[Trace], allowed: float) -> Verdict:
    """Find what got worse by more than `allowed` (0.05 is 5 %) beyond the noise.

    Judged are TTFT, TPOT and peak memory, and every stage and part that takes 2 % of its phase or
    more. Many chances to fail by luck add up, so half of the 5 % that may fail by luck is shared
    out among the former, half among the latter (Bonferroni).
    """
    plain = compare(first, second)
    if plain.refused:
        return Verdict([], 0, plain.refused[0])
    if (few := _too_few(*plain.calls)) is not None:
        return Verdict([], 0, f"{few}; trace each at least twice (--repeats)")
    sides = _Side.of(first), _Side.of(second)
    worse, judged = regressions(*sides, list(PHASES), allowed)
    return Verdict(worse, judged, None)


def regressions(first: "_Side", second: "_Side", phases: list[str], allowed: float) -> tuple[list[Row], int]:
    """What got worse by more than `allowed` beyond the noise, and of how many quantities."""
    rows: list[Row] = []
    for measure in (_gated_headline, _gated_stages):
        count = len(measure(first, second, phases, noise.CONFIDENCE))
        rows += measure(first, second, phases, 1 - 0.025 / max(count, 1))
    worse = [row for row in rows if row.difference.beyond_noise and (row.difference.change or 0.0) > allowed]
    return worse, len(rows)


def _gated_headline(first: "_Side", second: "_Side", phases: list[str], confidence: float) -> list[Row]:
    return [row for row in _headline(first, second, phases, confidence) if row.phase is None]


def _gated_stages(first: "_Side", second: "_Side", phases: list[str], confidence: float) -> list[Row]:
    rows = [row for phase in phases for row in _stage_rows(first, second, phase, confidence)]
    return [row for row in rows if _larger_share(row) >= NOTABLE]


def _larger_share(row: Row) -> float:
    """The longer of both times, as a part of the first side's phase."""
    found = row.difference
    return row.share * max(found.first, found.second) / found.first if row.share and found.first else 0.0
