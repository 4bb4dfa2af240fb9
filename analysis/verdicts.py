"""What a trace's rooflines come to, in words and a few numbers: bounds, lost time, thresholds, growth."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from . import ceilings as ceilings_module
from . import units
from .ceilings import Ceilings
from .roofline import (
    COMPUTE,
    LAUNCH,
    MEMORY,
    UNKNOWN,
    PhaseVerdict,
    StageVerdict,
    Verdict,
    counted_steps,
    phase_verdicts,
    rooflines,
    total,
)
from .schema import RELEASE
from .trace import Trace

LOSSES = 3
MUCH = 0.1  # of a phase's time
UNSTEADY = 1.15  # equal runs that differ by more make their times doubtful
HELP_LAUNCHING = "a larger batch, a static cache with a compiled decode, or CUDA graphs would help"


@dataclass(frozen=True)
class Loss:
    """A stage or part that took much longer than its roof. Times in ns over one call."""

    phase: str
    stage: str
    part: str | None
    bound: str
    time_ns: float
    lost_ns: float
    share_of_phase: float
    reason: str


@dataclass(frozen=True)
class Statement:
    """One sentence on what limits a phase; `confidence` is high, medium or low, `doubts` say why not more."""

    phase: str
    bound: str
    sentence: str
    confidence: str
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Thresholds:
    """Where the bound would turn on this device; null where the counts or ceilings do not say.

    `decode_batch`: sequences at which decode turns compute-bound, at this trace's contexts.
    `prefill_length`: prompt tokens of each sequence at which prefill does. `kv_context`: positions
    at which a decode step reads more KV than weights, at this trace's batch.
    """

    decode_batch: int | None
    prefill_length: int | None
    kv_context: int | None


@dataclass(frozen=True)
class Growth:
    """How the time of a decode step grows with the positions in the cache (least squares).

    In µs per 1,000 positions, with the standard error of the slope. The shares say how much of it
    reading the KV, and the cache's own copying, explain at this device's bandwidth; null where the
    slope is not above twice its error, or the ceiling is unknown.
    """

    slope_us_per_1000: float
    error_us_per_1000: float
    steps: int
    kv_read_share: float | None
    kv_copy_share: float | None


@dataclass(frozen=True)
class Verdicts:
    """All that is judged of one trace. `ceilings_source` is null where the device is unknown."""

    ceilings_source: str | None
    statements: list[Statement]
    phases: list[PhaseVerdict]
    stages: list[StageVerdict]
    losses: list[Loss]
    thresholds: Thresholds
    growth: Growth | None
    notes: list[str]

    def stage(self, phase: str, stage: str, part: str | None = None) -> StageVerdict | None:
        """The row of one stage or part; null where the phase has none."""
        key = (phase, stage, part)
        return next((row for row in self.stages if (row.phase, row.stage, row.part) == key), None)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists; each bound is a word under `bound`."""
        return {
            "ceilings_source": self.ceilings_source,
            "statements": [asdict(row) | {"doubts": list(row.doubts)} for row in self.statements],
            "phases": [_flat(row) for row in self.phases],
            "stages": [_flat(row) for row in self.stages],
            "losses": [asdict(row) for row in self.losses],
            "thresholds": asdict(self.thresholds),
            "growth": asdict(self.growth) if self.growth else None,
            "notes": list(self.notes),
        }


def judge(trace: Trace) -> Verdicts:
    """Judge a trace by the ceilings stored in it, else by the datasheet of its device."""
    ceilings, note = ceilings_module.of_manifest(trace.meta)
    stages = rooflines(trace, ceilings)
    phases = phase_verdicts(trace, ceilings)
    return Verdicts(
        ceilings_source=ceilings.source if ceilings else None,
        statements=[statement(phase, ceilings, (trace.meta.get("overhead") or {}).get("noise")) for phase in phases],
        phases=phases,
        stages=stages,
        losses=losses(stages, ceilings),
        thresholds=thresholds(trace, phases, stages, ceilings),
        growth=decode_growth(trace, phases, ceilings),
        notes=[note] if note else [],
    )


def _flat(row: PhaseVerdict | StageVerdict) -> dict[str, Any]:
    """One level of keys: the row's own, its work's and its verdict's; the explanation stays one object."""
    whole = asdict(row)
    work, judged = whole.pop("work"), whole.pop("verdict")
    work["bytes"] = work.pop("bytes_")
    return whole | work | judged


# -- lost time ---------------------------------------------------------------------------------


def losses(stages: Sequence[StageVerdict], ceilings: Ceilings | None, most: int = LOSSES) -> list[Loss]:
    """The rows that lost most time, each with its reason. A stage that is split is ranked by its parts."""
    split = {(row.phase, row.stage) for row in stages if row.part is not None and row.verdict.lost_ns is not None}
    ranked = [row for row in stages if row.part is not None or (row.phase, row.stage) not in split]
    ranked = [row for row in ranked if (row.verdict.lost_ns or 0) > 0]
    ranked.sort(key=lambda row: -(row.verdict.lost_ns or 0))
    return [_loss(row, ceilings) for row in ranked[:most]]


def _loss(row: StageVerdict, ceilings: Ceilings | None) -> Loss:
    lost_ns = row.verdict.lost_ns or 0.0
    share = row.share * lost_ns / row.time_ns if row.time_ns else 0.0
    return Loss(row.phase, row.stage, row.part, row.verdict.bound, row.time_ns, lost_ns, share, _reason(row, ceilings))


def _reason(row: StageVerdict, ceilings: Ceilings | None) -> str:
    """A sentence on the largest known part of the lost time, and on how much no figure explains."""
    lost_ns, parts = row.verdict.lost_ns or 0.0, row.explanation
    if parts is None or not lost_ns:
        return "nothing is known of it"
    known = [
        (parts.kernel_gap_ns or 0.0, _kernel_words(row)),
        (parts.copy_ns or 0.0, _copy_words(row)),
        (parts.launch_ns or 0.0, _launch_words(row, ceilings)),
        (parts.weights_ns or 0.0, _weights_words(row)),
        (parts.communication_ns or 0.0, "the processes talk to each other, and wait for the one that comes last"),
    ]
    largest_ns, words = max(known, key=lambda part: part[0])
    if largest_ns < 0.1 * lost_ns:
        return f"no measured figure explains it: {_unexplained_words(row)}"
    share = min(1.0, largest_ns / lost_ns)
    rest = "" if share > 0.5 else "; no measured figure explains most of the rest"
    return f"{share:.0%} of it because {words}{rest}"


def _kernel_words(row: StageVerdict) -> str:
    than = "the best product" if row.verdict.bound == COMPUTE else "reading"
    return f"{_products(row.work.rows)} reach less than {than} on this device"


def _products(rows: float | None) -> str:
    if rows is None or rows <= 1:
        return "matrix–vector products"
    return f"products of {rows:,.0f} rows"


def _copy_words(row: StageVerdict) -> str:
    moved = units.byte_count(row.work.kv_copy_bytes)
    return f"the cache moves {moved} besides at its appends, which a static cache does not"


def _launch_words(row: StageVerdict, ceilings: Ceilings | None) -> str:
    cost = units.time(ceilings.launch_ns.median) if ceilings and ceilings.launch_ns else units.NONE
    return f"it launches {row.work.op_count or 0:,.0f} operators at {cost} each"


def _weights_words(row: StageVerdict) -> str:
    if row.part == RELEASE:
        return "offloaded weights are let go of after each call, which weights on the device need not be"
    brought = units.byte_count(row.work.weight_bytes)
    return f"offloaded weights are brought to where they are used, {brought}, which weights on the device need not be"


def _unexplained_words(row: StageVerdict) -> str:
    if row.work.op_count is None:
        return "its operators were not counted, so what launching them cost is not known"
    return "its kernels stay below what they reach alone, or the host does other things between them"


# -- sentences ---------------------------------------------------------------------------------


def statement(phase: PhaseVerdict, ceilings: Ceilings | None, noise: float | None = None) -> Statement:
    """Say in a sentence what limits a phase, with how far that can be trusted.

    `noise` is the slowest of equal untraced runs ÷ the fastest, null where there were none.
    """
    judged = phase.verdict
    words = {COMPUTE: _compute_words, MEMORY: _memory_words, LAUNCH: _launch_sentence}
    waiting = _waiting_words(phase)
    if judged.bound == UNKNOWN or ceilings is None:
        limits = f"{waiting}; what limits the rest" if waiting else f"What limits {phase.phase}"
        sentence = f"{limits} is unknown: {_unknown_words(phase, ceilings)}."
        return Statement(phase.phase, UNKNOWN, sentence, "low", ())
    near = f", close to {judged.close_to}-bound" if judged.close_to else ""
    subject = f"{waiting}; beside that it" if waiting else phase.phase.capitalize()
    of_roof = f", {units.percent(judged.efficiency)} of its roof" if judged.efficiency is not None else ""
    sentence = (
        f"{subject} is {judged.bound}-bound{near}: {words[judged.bound](phase, ceilings)}; "
        f"it took {units.time(phase.time_ns / phase.steps * phase.calls)}{of_roof}.{_rest_words(phase)}"
    )
    doubts, confidence = _doubts(phase, ceilings, noise)
    return Statement(phase.phase, judged.bound, sentence, confidence, doubts)


def _waiting_words(phase: PhaseVerdict) -> str | None:
    """That a phase waits much of its time, and longer than any term of its own work takes."""
    waits, judged = phase.waits, phase.verdict
    longest_ns, words = max(
        (waits.weights_ns or 0.0, "for offloaded weights"), (waits.communication_ns or 0.0, "for other processes")
    )
    own_ns = max(judged.roof_ns or 0.0, judged.launch_ns or 0.0)
    if longest_ns <= own_ns or longest_ns < MUCH * phase.time_ns:
        return None
    return f"{phase.phase.capitalize()} waits {words} in {longest_ns / phase.time_ns:.0%} of its time"


def _per_step(phase: PhaseVerdict, value: float | None) -> float | None:
    return None if value is None else value * phase.calls / phase.steps


def _compute_words(phase: PhaseVerdict, ceilings: Ceilings) -> str:
    peak = ceilings.peak_flops_per_s(phase.dtype)
    return (
        f"a step of {_tokens(phase)} needs {_flop(_per_step(phase, phase.work.flops))}, "
        f"{units.time(_per_step(phase, phase.verdict.compute_ns))} at {_flop(peak)}/s, "
        f"and its bytes {units.time(_per_step(phase, phase.verdict.memory_ns))}"
    )


def _memory_words(phase: PhaseVerdict, ceilings: Ceilings) -> str:
    bandwidth = ceilings.read_bytes_per_s(phase.working_set_bytes)
    return (
        f"a step of {_tokens(phase)} moves {units.byte_count(_per_step(phase, phase.work.bytes_))}, "
        f"{units.time(_per_step(phase, phase.verdict.memory_ns))} at {units.byte_count(bandwidth)}/s, "
        f"and its FLOPs {units.time(_per_step(phase, phase.verdict.compute_ns))}"
    )


def _launch_sentence(phase: PhaseVerdict, ceilings: Ceilings) -> str:
    roof = units.time(_per_step(phase, phase.verdict.roof_ns))
    if phase.verdict.launch_ns is None or ceilings.launch_ns is None:
        share = units.share(phase.work.starved_share)
        return f"at {share} of its layers the device had run out of work, whose roof is {roof}; {HELP_LAUNCHING}"
    operators, cost = _per_step(phase, phase.work.op_count) or 0, units.time(ceilings.launch_ns.median)
    launching = units.time(_per_step(phase, phase.verdict.launch_ns))
    return f"a step launches {operators:,.0f} operators, {launching} at {cost} each, above its roof of {roof}" + (
        f"; {HELP_LAUNCHING}" if phase.phase == "decode" else ""
    )


def _tokens(phase: PhaseVerdict) -> str:
    tokens = _per_step(phase, phase.tokens)
    if tokens is None:
        return "the model"
    return f"{tokens:,.0f} token" + ("" if round(tokens) == 1 else "s")


def _rest_words(phase: PhaseVerdict) -> str:
    """Where most of the time beyond the roof went, if that is much."""
    parts, efficiency = phase.explanation, phase.verdict.efficiency
    if parts is None or efficiency is None or efficiency > 0.8:
        return ""
    named = [
        (parts.kernel_gap_ns or 0.0, f"{_products(phase.work.rows)}, which stay below the roof on this device"),
        (parts.copy_ns or 0.0, "the cache's own copying"),
        (parts.launch_ns or 0.0, "launching operators"),
        (parts.weights_ns or 0.0, "bringing offloaded weights to where they are used"),
        (parts.communication_ns or 0.0, "talking to the other processes"),
        (parts.unexplained_ns, "what no measured figure explains"),
    ]
    largest_ns, words = max(named, key=lambda part: part[0])
    return f" The largest part of the rest, {units.time(_per_step(phase, largest_ns))}, is {words}."


def _unknown_words(phase: PhaseVerdict, ceilings: Ceilings | None) -> str:
    if ceilings is None:
        return "no ceilings are known for its device"
    if phase.work.flops is None:
        return "some of its FLOPs could not be counted"
    if phase.work.bytes_ is None:
        return "some of the bytes that it moves could not be counted"
    if phase.verdict.compute_ns is None:
        return f"there is no matmul ceiling for {phase.dtype or 'its dtype'}"
    return "no bandwidth is known" if phase.verdict.memory_ns is None else "it holds no counted work"


def _doubts(phase: PhaseVerdict, ceilings: Ceilings, noise: float | None) -> tuple[tuple[str, ...], str]:
    """What speaks against a verdict, and the confidence that is left: high without any, low with a grave one."""
    judged = phase.verdict
    grave: list[str] = []
    light: list[str] = []
    if judged.fault:
        grave.append(judged.fault)
    if noise is not None and noise > UNSTEADY:
        grave.append(f"equal untraced runs differ by {noise - 1:.0%}")
    if ceilings.quietness is not None and not ceilings.quietness.quiet:
        grave.append("the machine was not quiet when its ceilings were measured")
    if judged.launch_ns is None and phase.work.starved_share is None:
        few = judged.efficiency is not None and judged.efficiency < 0.5
        (grave if few else light).append("operators were not counted, so launching is not judged")
    if not ceilings.measured:
        light.append("the ceilings are a datasheet's, not measured")
    if judged.close_to:
        light.append(f"{judged.close_to} comes within 10 %")
    if phase.steps < 3:
        light.append(f"{phase.steps} step{'s' if phase.steps > 1 else ''} only")
    explained = phase.explanation.explained_share if phase.explanation is not None else 1.0
    if explained < 0.5:
        (grave if explained < 0.1 else light).append(f"{1 - explained:.0%} of the time is not explained")
    return (*grave, *light), "low" if grave else "medium" if light else "high"


def _flop(flops: float | None) -> str:
    if flops is None:
        return units.NONE
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if flops >= scale:
            return f"{units.significant(flops / scale)} {unit}"
    return f"{flops:,.0f} FLOP"


def bound_word(judged: Verdict) -> str:
    """The bound as a table shows it: both words near a tie."""
    return f"{judged.bound} ≈ {judged.close_to}" if judged.close_to else judged.bound


# -- where the bound turns ---------------------------------------------------------------------


def thresholds(
    trace: Trace, phases: Sequence[PhaseVerdict], stages: Sequence[StageVerdict], ceilings: Ceilings | None
) -> Thresholds:
    """The batch, the prompt length and the context at which the bound turns, from this trace's counts."""
    steps = counted_steps(trace)
    decode = [step for step in steps if step["phase"] == "decode"]
    rates = {phase.phase: _rates(phase, ceilings) for phase in phases}
    mixture = _has_experts(trace)
    batch = length = None
    if (decoding := rates.get("decode")) is not None and not mixture:
        batch = _decode_batch_of(decode, *decoding)
    if (filling := rates.get("prefill")) is not None and not mixture:
        length = _prefill_length_of(steps, stages, *filling)
    return Thresholds(batch, length, kv_context(decode))


def _rates(phase: PhaseVerdict, ceilings: Ceilings | None) -> tuple[float, float] | None:
    """Peak FLOP/s and bandwidth of a phase."""
    if ceilings is None:
        return None
    peak = ceilings.peak_flops_per_s(phase.dtype)
    bandwidth = ceilings.read_bytes_per_s(phase.working_set_bytes)
    return (peak, bandwidth) if peak is not None and bandwidth is not None else None


def _has_experts(trace: Trace) -> bool:
    """Whether more tokens read more weights, as with a mixture of experts: then no line can be drawn."""
    config = (trace.meta.get("model") or {}).get("config")
    known = config if isinstance(config, dict) else {}
    return any("expert" in key and isinstance(value, int) and value > 1 for key, value in known.items())


def decode_batch(
    flops_per_sequence: float, bytes_per_sequence: float, weight_bytes: float, peak: float, bandwidth: float
) -> int | None:
    """Sequences at which decode turns compute-bound; null where it never does.

    b · f ÷ peak = (W + b · s) ÷ bandwidth, with f and s the FLOPs and bytes (KV, activations) of one
    sequence: b = W ÷ bandwidth ÷ (f ÷ peak − s ÷ bandwidth). A sequence whose KV takes longer to
    read than its FLOPs to compute keeps decode memory-bound at any batch.
    """
    gain = flops_per_sequence / peak - bytes_per_sequence / bandwidth
    return _ceil(weight_bytes / bandwidth / gain) if gain > 0 else None


def _decode_batch_of(steps: Sequence[dict[str, Any]], peak: float, bandwidth: float) -> int | None:
    batches = {step["batch"] for step in steps}
    names = ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes")
    flops, weights, *others = (total([step[name] for step in steps]) for name in names)
    other = total(others)
    if len(batches) != 1 or flops is None or weights is None or other is None:
        return None
    batch, count = next(iter(batches)), len(steps)
    return decode_batch(flops / count / batch, other / count / batch, weights / count, peak, bandwidth)


def prefill_length(
    flops_per_token: float,
    flops_per_pair: float,
    flops_once: float,
    bytes_per_token: float,
    weight_bytes: float,
    batch: int,
    peak: float,
    bandwidth: float,
) -> int | None:
    """Prompt tokens at which prefill turns compute-bound; null where it does not below 10 million.

    Smallest n with batch · (h + a·n + c·n(n+1)/2) ÷ peak ≥ (W + batch · s·n) ÷ bandwidth: h of the
    head, which sees the last token alone, a of a token's weight products, c of a query–key pair of
    causal attention, s the bytes of a token. The difference is convex in n and below 0 at first.
    """

    def gain(n: int) -> float:
        flops = flops_once + flops_per_token * n + flops_per_pair * n * (n + 1) / 2
        return batch * flops / peak - (weight_bytes + batch * bytes_per_token * n) / bandwidth

    high = 1
    while gain(high) < 0:
        high *= 2
        if high > 10_000_000:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) >= 0 else (middle, high)
    return high


def _prefill_length_of(
    steps: Sequence[dict[str, Any]], stages: Sequence[StageVerdict], peak: float, bandwidth: float
) -> int | None:
    """From a prefill in one step without anything cached before, and the growth of decode's attention."""
    prefill = [step for step in steps if step["phase"] == "prefill"]
    first = prefill[0] if prefill else None
    if first is None or len(prefill) != len({step["call"] for step in prefill}) or first["kv_len_before"] != 0:
        return None
    needed = ("flops", "weight_bytes", "kv_write_bytes", "activation_bytes", "tokens_processed", "batch")
    if any(first[name] is None for name in needed) or not first["tokens_processed"] or not first["batch"]:
        return None
    batch, tokens = first["batch"], first["tokens_processed"] / first["batch"]
    pair = _flops_per_pair([step for step in steps if step["phase"] == "decode" and step["call"] == first["call"]])
    head = next((row.work.flops for row in stages if (row.phase, row.stage) == ("prefill", "lm_head")), 0.0)
    once = (head or 0.0) / batch
    per_token = (first["flops"] / batch - once - pair * tokens * (tokens + 1) / 2) / tokens
    moved = (first["kv_write_bytes"] + first["activation_bytes"]) / batch / tokens
    return prefill_length(per_token, pair, once, moved, first["weight_bytes"], batch, peak, bandwidth)


def _flops_per_pair(decode: Sequence[dict[str, Any]]) -> float:
    """FLOPs that one more position in the cache adds to a decode step of one sequence; 0 where not known."""
    known = [step for step in decode if step["flops"] is not None and step["kv_len_before"] is not None]
    if len(known) < 2 or known[-1]["kv_len_before"] <= known[0]["kv_len_before"]:
        return 0.0
    first, last = known[0], known[-1]
    grown = (last["flops"] - first["flops"]) / (last["kv_len_before"] - first["kv_len_before"])
    return max(0.0, grown / last["batch"])


def kv_context(decode: Sequence[dict[str, Any]]) -> int | None:
    """Positions at which a decode step reads more KV than weights: weights ÷ KV bytes of a position.

    Null where what is read does not grow in proportion to the positions (windows, states, a static
    cache, which is read in full).
    """
    known = [step for step in decode if step["kv_read_bytes"] and step["kv_len_before"] and step["weight_bytes"]]
    ratios = [step["kv_read_bytes"] / step["kv_len_before"] for step in known]
    if not ratios or max(ratios) - min(ratios) > 0.001 * max(ratios):
        return None
    return _ceil(fmean(step["weight_bytes"] for step in known) / ratios[0])


def _ceil(value: float) -> int:
    return max(1, int(-(-value // 1)))


# -- growth with the context -------------------------------------------------------------------


def decode_growth(trace: Trace, phases: Sequence[PhaseVerdict], ceilings: Ceilings | None) -> Growth | None:
    """The slope of decode time over the positions in the cache; null of fewer than three lengths."""
    steps = [s for s in counted_steps(trace) if s["phase"] == "decode" and s["kv_len_before"] and s["wall_ns"]]
    decode = next((phase for phase in phases if phase.phase == "decode"), None)
    lengths = [float(step["kv_len_before"]) for step in steps]
    if decode is None or len(set(lengths)) < 3:
        return None
    slope, error = line([(x, float(step["wall_ns"])) for x, step in zip(lengths, steps, strict=True)])
    size = decode.working_set_bytes
    certain = slope > 2 * error
    return Growth(
        slope_us_per_1000=slope,
        error_us_per_1000=error,
        steps=len(steps),
        kv_read_share=_share_of_slope(steps, "kv_read_bytes", slope, ceilings.read_bytes_per_s(size))
        if certain and ceilings
        else None,
        kv_copy_share=_share_of_slope(steps, "kv_copy_bytes", slope, ceilings.copy_bytes_per_s(size))
        if certain and ceilings
        else None,
    )


def _share_of_slope(
    steps: Sequence[dict[str, Any]], column: str, slope_ns: float, bandwidth: float | None
) -> float | None:
    """Time that the growth of some bytes takes at a bandwidth, as a share of the measured slope."""
    points = [(float(s["kv_len_before"]), float(s[column])) for s in steps if s[column] is not None]
    if bandwidth is None or len({x for x, _ in points}) < 2:
        return None
    return line(points)[0] / bandwidth * 1e9 / slope_ns


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the least-squares line through points, and its standard error (0 of two points).

    A slope in ns a position is the same number in µs per 1,000 positions.
    """
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    xx = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / xx
    if len(points) < 3:
        return slope, 0.0
    residual = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, (residual / (len(points) - 2) / xx) ** 0.5
