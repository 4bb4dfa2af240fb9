"""The aggregations behind `show` and `compare`, on the tables of one trace or of a fleet of them.

Each function takes tables as any engine that narwhals knows holds them: a pyarrow table, a pandas or polars frame, a
DuckDB relation, a Dask or Spark frame. It returns a narwhals `LazyFrame`: `.collect()` computes it, `.to_native()` is
the engine's own. Nothing here is specific to an engine, and no window over rows is needed.

`by` names the columns that tell traces apart: `run_id` and `rank` in a fleet, none in the trace of one process.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import narwhals as nw
from narwhals.typing import IntoFrame

from .schema import ASIDES

TRACE = ("run_id", "rank")
# What a span or step may have been counted or not: beside each sum stands how many values it is of.
SPAN_WORK = (
    "flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "kv_copy_bytes", "input_bytes", "output_bytes",
    "op_count", "device_ns", "starved",
)  # fmt: skip
STEP_WORK = (
    "tokens_processed", "flops", "op_count", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "kv_copy_bytes",
    "activation_bytes",
)  # fmt: skip
SPAN_COLUMNS = ("step", "span", "parent", "stage", "part", "start_ns", "host_ns")
OWN = "own"
TIMES = ("host_ns", "device_ns")

Frame = nw.LazyFrame[Any]
Rows = IntoFrame | Frame


# -- where the time went -----------------------------------------------------------------------


def breakdown(spans: Rows, steps: Rows, by: Sequence[str] = TRACE) -> Frame:
    """Time of each stage and part of each run, as `lifetrace show` has it.

    Args:
        spans: the `spans` tables of the traces.
        steps: the `steps` tables of the same.
        by: the columns that tell traces apart.

    Returns:
        The columns `by`, `phase`, `stage`, `part` (null on a stage's own row), `count` of spans, `time_ns` of one call
        (the mean over the traced calls; where spans of some steps alone were recorded, those stand for the others)
        and `share` of its phase.
    """
    stages = step_stages(spans, by)
    facts = recorded_steps(stages, steps, by), steps_per_call(steps, by)
    times = stage_times(stage_sums(stages, steps, by), *facts, by)
    part = nw.when(nw.col("part") != "").then(nw.col("part")).alias("part")
    return times.select(*by, "phase", "stage", part, "count", "time_ns", "share")


def step_stages(spans: Rows, by: Sequence[str] = TRACE, work: Sequence[str] = ()) -> Frame:
    """Sums of each stage in each step, and of each part right inside a stage.

    Returns:
        The columns `by`, `step`, `stage`, `part` (empty on a stage's own row), `count` of spans, `start_ns`
        (sum), `host_ns` (sum), and for each column of `work` its sum and, as `…_known`, of how many spans. The spans of
        whole steps give the same rows whatever others are beside them. What comes between the work of a part, its
        weights that are brought or what it tells other processes, is a part of its own, and no time of that one.
    """
    return _whole(part_of_step_stages(spans, by, work), [*by, "step", "stage", "part"])


def part_of_step_stages(spans: Rows, by: Sequence[str], work: Sequence[str]) -> Frame:
    """The same rows, as an engine adds them up: for tables that are put together of many parts."""
    sums = nw.len().alias("count"), nw.col("start_ns").sum(), nw.col("host_ns").sum(), *_sums_of_known(work)
    rows = _placed(spans, (*SPAN_COLUMNS, *work), by)
    return _add_up(rows, [*by, "step", "stage", "part"], *sums).filter(*_is_placed())


def stage_sums(stages: Rows, steps: Rows, by: Sequence[str] = TRACE, work: Sequence[str] = ()) -> Frame:
    """Sums of `step_stages` over the steps that statistics count.

    Returns:
        The columns `by`, `phase`, `stage`, `part` (empty on a stage's own row), `count`, `host_ns`, `offset_ns` (the
        sum of where each span began in its step), and each column of `work` with its `…_known`.
    """
    began = nw.col("step_ns").fill_null(0)  # the order stays where it is not known
    placed = _of_counted(stages, steps, by).with_columns(
        (nw.col("start_ns") - nw.col("count") * began).alias("offset_ns")
    )
    names = ("count", "host_ns", "offset_ns", *_and_known(work))
    keys = [*by, "phase", "stage", "part"]
    return _whole(placed.group_by(keys).agg(*(nw.col(name).sum() for name in names)), keys)


def recorded_steps(stages: Rows, steps: Rows, by: Sequence[str] = TRACE) -> Frame:
    """How many of the steps that statistics count have spans: the columns `by`, `phase`, `recorded`."""
    mine = _of_counted(stages, steps, by).group_by([*by, "phase", "step"]).agg(nw.len().alias("rows"))
    return mine.group_by([*by, "phase"]).agg(nw.len().alias("recorded"))


def stage_times(sums: Rows, recorded: Rows, per_call: Rows, by: Sequence[str] = TRACE) -> Frame:
    """Times of one call from sums over all: what `breakdown` returns, with `order`, the mean start within a step in ns.

    Args:
        sums: of `stage_sums`.
        recorded: of `recorded_steps`, which the sums are of.
        per_call: of `steps_per_call`.
        by: the columns that tell traces apart.

    A layer that has parts gets a row `own` for what it does outside of them; `part` is empty on a stage's own row.
    """
    rows = _lazy(sums).select(*by, "phase", "stage", "part", "count", "host_ns", "offset_ns")
    rows = nw.concat([rows, _own(rows, by)])
    whole = rows.filter(nw.col("part") == "").group_by([*by, "phase"]).agg(nw.col("host_ns").sum().alias("phase_ns"))
    facts = whole.join(_lazy(recorded), on=[*by, "phase"], how="inner")
    facts = facts.join(_lazy(per_call), on=[*by, "phase"], how="inner")
    a_call = nw.col("host_ns") * (nw.col("steps_per_call") / nw.col("recorded"))
    share = nw.when(nw.col("phase_ns") > 0).then(nw.col("host_ns") / nw.col("phase_ns")).otherwise(0.0)
    return rows.join(facts, on=[*by, "phase"], how="inner").with_columns(
        a_call.alias("time_ns"), share.alias("share"), (nw.col("offset_ns") / nw.col("count")).alias("order")
    )


def _own(rows: Frame, by: Sequence[str]) -> Frame:
    """A layer's time less that of its parts, where it has any."""
    layers, inside_ns = rows.filter(nw.col("stage") == "layer"), nw.col("host_ns").sum().alias("inside_ns")
    inside = layers.filter(nw.col("part") != "").group_by([*by, "phase"]).agg(inside_ns)
    whole = layers.filter(nw.col("part") == "").join(inside, on=[*by, "phase"], how="inner")
    own = (nw.col("host_ns") - nw.col("inside_ns")).cast(nw.Int64).alias("host_ns")
    names = (*by, "phase", "stage", "count", "offset_ns")
    found = whole.select(*names, own).with_columns(nw.lit(OWN).alias("part"))
    return found.select(*by, "phase", "stage", "part", "count", "host_ns", "offset_ns")


# -- steps -------------------------------------------------------------------------------------


def counted_steps(steps: Rows, by: Sequence[str] = TRACE, columns: Sequence[str] = ()) -> Frame:
    """The steps that statistics count: at the top level, not cold, their result used.

    Returns:
        The columns `by`, `step`, `call`, `phase` and those that were named.
    """
    cold = nw.col("warmup").fill_null(False)
    return _kept_steps(steps, by, ("warmup", *columns)).filter(~cold).select(*by, "step", "call", "phase", *columns)


def steps_per_call(steps: Rows, by: Sequence[str] = TRACE) -> Frame:
    """Top-level steps of each phase in a call that has that phase, on average: `by`, `phase`, `steps_per_call`.

    Cold ones are steps too.
    """
    calls = _kept_steps(steps, by, ()).group_by([*by, "phase", "call"]).agg(nw.len().alias("steps"))
    found = calls.group_by([*by, "phase"]).agg(nw.col("steps").sum(), nw.len().alias("calls"))
    return found.select(*by, "phase", (nw.col("steps") / nw.col("calls")).alias("steps_per_call"))


def phase_totals(steps: Rows, by: Sequence[str] = TRACE) -> Frame:
    """Totals of prefill and of decode over the steps that statistics count.

    Returns:
        The columns `by`, `phase`, `steps`, `calls`, `wall_ns` (sum), `kv_bytes` held after the steps (sum),
        `kv_bytes_beside` (of those whose weights are known), and each column of `STEP_WORK` with its `…_known`.
    """
    names = ("wall_ns", "kv_bytes", *STEP_WORK)
    rows = counted_steps(steps, by, names)
    beside = nw.when(~nw.col("weight_bytes").is_null()).then(nw.col("kv_bytes"))
    totals = rows.with_columns(beside.alias("kv_bytes_beside")).group_by([*by, "phase"]).agg(
        nw.len().alias("steps"), nw.col("wall_ns").sum(), nw.col("kv_bytes").sum(), nw.col("kv_bytes_beside").sum(),
        *_sums_of_known(STEP_WORK),
    )  # fmt: skip
    calls = rows.group_by([*by, "phase", "call"]).agg(nw.len().alias("steps"))
    calls = calls.group_by([*by, "phase"]).agg(nw.len().alias("calls"))
    return _whole(totals.join(calls, on=[*by, "phase"], how="inner"), [*by, "phase"])


# -- what compare looks at ---------------------------------------------------------------------


def call_stages(stages: Rows, steps: Rows, by: Sequence[str] = TRACE) -> Frame:
    """Time of each stage and part in each of some steps.

    Args:
        stages: of `step_stages`.
        steps: the steps that are looked at, with the columns `by`, `step`, `call`, `phase`.
        by: the columns that tell traces apart.

    Returns:
        The columns `by`, `call`, `step`, `phase`, `stage`, `part` (empty on a stage's own row) and `host_ns`.
    """
    chosen = _lazy(steps).select(*by, "step", "call", "phase")
    rows = _lazy(stages).join(chosen, on=[*by, "step"], how="inner")
    return rows.select(*by, "call", "step", "phase", "stage", "part", "host_ns")


def places(spans: Rows, steps: Rows, by: Sequence[str] = TRACE) -> Frame:
    """Time in each place of the model over some steps: a layer's part, and each stage as a whole.

    Args:
        spans: the `spans` tables.
        steps: the steps to add up, with the columns `by`, `step`, `phase`.
        by: the columns that tell traces apart.

    Returns:
        The columns `by`, `phase`, `stage`, `layer` (-1 outside of layers), `part` (empty on a stage's own row) and
        `host_ns`. Rows of some spans and of others may be added.
    """
    rows = _placed(spans, ("step", "span", "parent", "stage", "layer", "part", "host_ns"), by)
    chosen = _lazy(steps).select(*by, "step", "phase")
    rows = rows.with_columns(nw.col("layer").fill_null(-1)).filter(*_is_placed())
    mine = rows.join(chosen, on=[*by, "step"], how="inner")
    keys = [*by, "phase", "stage", "layer", "part"]
    return _whole(_add_up(mine, keys, nw.col("host_ns").sum()), keys)


# -- common ------------------------------------------------------------------------------------


def _lazy(rows: Rows) -> Frame:
    frame: Frame = nw.from_native(rows).lazy()
    return frame


def _is_in_memory(rows: Rows) -> bool:
    return isinstance(nw.from_native(rows), nw.DataFrame)


def _read(native: Rows, columns: Iterable[str], by: Sequence[str]) -> Frame:
    """Some columns of a table, words as texts and flags as numbers, the keys never null."""
    keys: dict[str, nw.Expr] = {
        "run_id": nw.col("run_id").cast(nw.String).fill_null(""), "rank": nw.col("rank").fill_null(0)
    }  # fmt: skip
    words = dict.fromkeys(("stage", "part", "phase"), nw.String) | {"starved": nw.Float64}
    frame = _lazy(native)
    return frame.select(
        *(keys[name] for name in by),
        *(nw.col(name).cast(words[name]) if name in words else nw.col(name) for name in columns),
    )


def _kept_steps(steps: Rows, by: Sequence[str], columns: Sequence[str]) -> Frame:
    rows = _read(steps, dict.fromkeys(("step", "call", "phase", "parent_step", "discarded", *columns)), by)
    return rows.filter(nw.col("parent_step").is_null(), ~nw.col("discarded").fill_null(False))


def _of_counted(stages: Rows, steps: Rows, by: Sequence[str]) -> Frame:
    counted = counted_steps(steps, by, ["start_ns"])
    counted = counted.select(*by, "step", "phase", nw.col("start_ns").alias("step_ns"))
    return _lazy(stages).join(counted, on=[*by, "step"], how="inner")


def _placed(spans: Rows, columns: Sequence[str], by: Sequence[str]) -> Frame:
    """Spans whose `part` is empty at the top of a step, their own right inside a stage, and null deeper down.

    What comes between the work of a part, `attention.weights` say, is placed by its last word at any depth; `around`
    is the part that it is in, a column that is not there where no span is of that kind.
    """
    rows, is_top = _read(spans, columns, by), nw.col("parent").is_null()
    top = rows.select(*by, "span", "parent").filter(is_top)
    if not by and _is_in_memory(spans):
        # in memory and of one trace: looking up numbers takes a tenth of a join
        inside = nw.col("parent").is_in(top.select("span").collect()["span"])
    else:
        known = top.select(*by, nw.col("span").alias("parent"), nw.lit(1).alias("inside"))
        rows = rows.join(known, on=[*by, "parent"], how="left")
        inside = ~nw.col("inside").is_null()
    placed: nw.Expr = nw.when(is_top).then(nw.lit("")).when(inside).then(nw.col("part"))
    if not _may_have_asides(spans):
        return rows.with_columns(placed.alias("part"))
    around = nw.col("part")
    for word in ASIDES:
        is_aside = nw.col("part").str.ends_with(f".{word}")
        placed = nw.when(is_aside).then(nw.lit(word)).otherwise(placed)
        around = around.str.replace_all(f".{word}", "", literal=True)
    placed = placed.cast(nw.String)
    return rows.with_columns(placed.alias("part"), nw.when(around != nw.col("part")).then(around).alias("around"))


def _may_have_asides(spans: Rows) -> bool:
    """Whether a span comes between the work of a part: in memory that is known at once, and mostly none does."""
    frame = nw.from_native(spans)
    if not isinstance(frame, nw.DataFrame):
        return True
    words = tuple(f".{word}" for word in ASIDES)
    return any(part.endswith(words) for part in frame["part"].drop_nulls().unique().to_list())


def _add_up(rows: Frame, keys: Sequence[str], *sums: nw.Expr) -> Frame:
    """Sums over spans that are placed; what comes between the work of a part is no time of that part."""
    found = rows.group_by(list(keys)).agg(*sums)
    if "around" not in rows.collect_schema().names():
        return found
    asides = rows.filter(~nw.col("around").is_null())
    columns = found.collect_schema().names()
    times = [name for name in TIMES if name in columns]
    around = nw.col("around").cast(nw.String).alias("part")
    inside = asides.select(*(key for key in keys if key != "part"), around, *times)
    taken = inside.group_by(list(keys)).agg(*(nw.col(name).sum().alias(f"{name}_aside") for name in times))
    less = [(nw.col(name) - nw.col(f"{name}_aside").fill_null(0)).alias(name) for name in times]
    return found.join(taken, on=list(keys), how="left").with_columns(*less).select(columns)


def _is_placed() -> tuple[nw.Expr, nw.Expr]:
    """Of a step, and at one of its places; asked of sums, which are fewer than spans."""
    return ~nw.col("step").is_null(), ~nw.col("part").is_null()


def _sums_of_known(columns: Sequence[str]) -> Iterable[nw.Expr]:
    for name in columns:
        yield nw.col(name).sum()
        yield nw.col(name).count().alias(f"{name}_known")


def _whole(sums: Frame, keys: Sequence[str]) -> Frame:
    """The same with sums and counts of 64 bits, 0 of nothing: engines differ in both."""
    names = [name for name in sums.collect_schema().names() if name not in keys]
    return sums.with_columns(*(nw.col(name).fill_null(0).cast(nw.Int64) for name in names))


def _and_known(columns: Sequence[str]) -> list[str]:
    return [each for name in columns for each in (name, f"{name}_known")]
