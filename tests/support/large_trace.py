"""A long trace made of a short real one: its decode steps again and again, over an ever longer cache.

What a step does is a straight line over the positions in its cache, as the real steps say. Its times are those of
a real step chosen at random, all stretched by one factor of its own, so that they add up as they did and compress no
better than real ones. The files are written by the tracer's own writer, in parts of so many steps as it would have
flushed, and completed by it: such a trace has the files of a real run of that length.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lifetrace.analysis import read_trace, schema
from lifetrace.writer import TraceWriter

Numbers = npt.NDArray[np.int64]
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "smollm2"
FLUSH_NS, FLUSH_STEPS = 2_000_000_000, 512  # what the tracer writes a part after
SPREAD = 0.03  # of the logarithm of the factor by which a step is stretched
STEP_TIMES = ("wall_ns", "forward_ns", "sample_ns", "prepare_ns")
# What the tracer measures or numbers; all else of a decode step is a line over the positions in its cache.
OWN = {
    "steps": {"step", "start_ns", "rss_bytes", *STEP_TIMES},
    "spans": {"step", "span", "parent", "start_ns", "host_ns"},
    "kv": {"step"},
}
PAUSE_NS = 50_000_000  # between calls
GAP_NS = 1_000  # between steps


@dataclass(frozen=True)
class Rows:
    """One table's rows of every decode step of the sample: those of the first, and lines over its positions.

    `first` is the step with fewest positions, `slopes` what one more position adds to each row of a column.
    """

    first: pa.Table
    slopes: dict[str, Numbers]

    @classmethod
    def of(cls, name: str, rows: pa.Table, steps: Numbers, lengths: Numbers) -> "Rows":
        """From rows sorted by step, as many of each."""
        count = len(rows) // len(steps)
        slopes = {}
        for column in schema.TABLES[name].columns:
            if not pa.types.is_integer(column.type) or column.name in OWN[name] or rows[column.name].null_count:
                continue
            values = rows[column.name].to_numpy().reshape(len(steps), count).astype(np.int64)
            slope = (values[-1] - values[0]) // (lengths[-1] - lengths[0])
            if slope.any():
                slopes[column.name] = slope
        return cls(rows.slice(0, count), slopes)

    def repeated(self, grown: Numbers) -> dict[str, pa.Array | pa.ChunkedArray]:
        """The columns of so many steps, of which each holds so many positions more than the first."""
        count = len(self.first)
        again = self.first.take(pa.array(np.tile(np.arange(count), len(grown))))
        columns = dict(zip(again.column_names, again.columns, strict=True))
        for name, slope in self.slopes.items():
            values = again[name].to_numpy().astype(np.int64) + np.repeat(grown, count) * np.tile(slope, len(grown))
            columns[name] = pa.array(values).cast(again.schema.field(name).type)
        return columns


@dataclass(frozen=True)
class Template:
    """One call of the sample: its prefill step, its decode steps as lines, and their times from a step's start.

    `starts` and `ends` have a row a decode step and a column a span, `times` a column of `STEP_TIMES`.
    """

    call: dict[str, Any]
    prefill: dict[str, pa.Table]
    decode: dict[str, Rows]
    starts: Numbers
    ends: Numbers
    times: Numbers
    tokens: pa.Table
    loose: pa.Table


@dataclass(frozen=True)
class Written:
    """What lies in a trace that was made: how many steps and spans, and the wall time of each step of each call."""

    path: Path
    steps: int
    spans: int
    wall_ns: list[Numbers]
    span_ns: dict[tuple[str, str, str | None], int]
    """Sum of `host_ns` by phase, stage and part, of spans at the top of a step and of parts right inside them."""


def templates(sample: Path = SAMPLE) -> list[Template]:
    """The calls of a stored trace."""
    trace = read_trace(sample)
    tables = {name: trace.table(name) for name in ("steps", "spans", "kv", "tokens")}
    return [_template(tables, call) for call in trace.meta["calls"]]


def _template(tables: dict[str, pa.Table], call: dict[str, Any]) -> Template:
    steps = tables["steps"].filter(pc.equal(tables["steps"]["call"], call["call"])).sort_by("step")
    first, *decode = steps["step"].to_pylist()
    lengths = steps["kv_len_before"].to_numpy()[1:].astype(np.int64)

    def of(name: str, wanted: list[int]) -> pa.Table:
        place = {"steps": "step", "spans": "span", "kv": "layer"}[name]
        rows = tables[name].filter(pc.is_in(tables[name]["step"], value_set=pa.array(wanted)))
        return rows.sort_by([("step", "ascending"), (place, "ascending")])

    spans, whole = of("spans", decode), of("steps", decode)
    shape = (len(decode), len(spans) // len(decode))
    at = spans["start_ns"].to_numpy().reshape(shape) - whole["start_ns"].to_numpy()[:, None]
    loose = tables["spans"].filter(pc.is_null(tables["spans"]["step"]))
    near = pc.and_(
        pc.greater_equal(loose["start_ns"], call["request_start_ns"]), pc.less(loose["start_ns"], call["end_ns"])
    )
    return Template(
        call=call,
        prefill={name: of(name, [first]) for name in ("steps", "spans", "kv")},
        decode={name: Rows.of(name, of(name, decode), np.array(decode), lengths) for name in ("steps", "spans", "kv")},
        starts=at,
        ends=at + spans["host_ns"].to_numpy().reshape(shape),
        times=np.stack([whole[name].to_numpy() for name in STEP_TIMES], axis=1),
        tokens=tables["tokens"].filter(pc.equal(tables["tokens"]["call"], call["call"])).sort_by("position"),
        loose=loose.filter(near),
    )


def write_large(path: Path, spans: int, sample: Path = SAMPLE, run_id: str = "large", seed: int = 0) -> Written:
    """Write a trace of so many spans or a few more, in as many calls as the sample has, all of one length."""
    random, found = np.random.default_rng(seed), templates(sample)
    per_step = len(found[0].decode["spans"].first)
    length = -(-spans // (per_step * len(found)))
    path.mkdir(parents=True)
    meta = json.loads((sample / "run.json").read_text())
    writer = TraceWriter(path)
    made = _Maker(writer, random, run_id)
    meta["calls"] = [made.call(template, length) for template in found]
    text = "".join(word or "" for word in found[-1].tokens["text"].to_pylist())
    writer.manifest(
        meta | {"run_id": run_id, "output": [text * max(1, length // 64)], "overhead": None, "command": None}
    )
    for name in ("steps", "spans", "kv", "tokens"):
        writer.complete(name, lambda rows: rows)
    for file in ("modules.parquet", "products.parquet"):
        shutil.copy(sample / file, path / file)
    return Written(path, made.step, made.spans, made.wall_ns, made.span_ns)


class _Maker:
    """Numbers steps and spans, and keeps the time, over the calls of a trace."""

    def __init__(self, writer: TraceWriter, random: np.random.Generator, run_id: str) -> None:
        self.writer, self.random, self.run_id = writer, random, run_id
        self.step = self.span = self.spans = self.now_ns = 0
        self.wall_ns: list[Numbers] = []
        self.span_ns: dict[tuple[str, str, str | None], int] = {}

    def call(self, template: Template, length: int) -> dict[str, Any]:
        """Write one call of so many steps; returns it as the manifest has it."""
        first = template.prefill["steps"].to_pylist()[0]
        shift = self.now_ns + PAUSE_NS - first["start_ns"]
        first_step = self.step
        ends = [self._prefill(template, shift)]
        chosen = self.random.integers(len(template.times), size=length - 1)
        factors = np.exp(self.random.normal(0, SPREAD, length - 1))
        times = _stretched(template.times[chosen], factors)
        starts = ends[0] + GAP_NS + np.concatenate([[0], np.cumsum(times[:-1, 0] + GAP_NS)])
        for part in _parts(times[:, 0]):
            self._decode(template, part, starts[part], chosen[part], factors[part], times[part])
        ends += (starts + times[:, 0]).tolist()
        self.wall_ns.append(np.concatenate([[first["wall_ns"]], times[:, 0]]))
        self._tokens(template, first_step, np.array(ends))
        self.now_ns = ends[-1]
        moved = {key: template.call[key] + shift for key in ("request_start_ns", "start_ns", "first_token_ns")}
        last = {"last_token_ns": ends[-1], "end_ns": ends[-1], "new_tokens": [length]}
        return template.call | moved | {"first_token_ns": ends[0]} | last

    def _prefill(self, template: Template, shift: int) -> int:
        """Write the first step and what lies outside of steps; returns its end."""
        tables = dict(template.prefill)
        spans, count = tables["spans"], len(tables["spans"])
        number = spans["span"].to_numpy() - spans["span"].to_numpy().min()
        parent = pc.add(spans["parent"], self.span - spans["span"].to_numpy().min())
        spans = _with(spans, span=number + self.span, parent=parent, step=np.full(count, self.step))
        loose = _with(template.loose, span=self.span + count + np.arange(len(template.loose)))
        for name, rows in (("steps", tables["steps"]), ("kv", tables["kv"])):
            tables[name] = _with(rows, step=np.full(len(rows), self.step))
        tables["spans"] = pa.concat_tables([loose, spans]).unify_dictionaries()
        for name in ("steps", "spans"):
            tables[name] = _with(tables[name], start_ns=tables[name]["start_ns"].to_numpy() + shift)
        self._write(tables, 1, count + len(loose))
        row = tables["steps"].to_pylist()[0]
        return int(row["start_ns"] + row["wall_ns"])

    def _decode(
        self, template: Template, part: slice, starts: Numbers, chosen: Numbers, factors: Any, times: Numbers
    ) -> None:
        grown, count = np.arange(part.start, part.stop), part.stop - part.start
        columns = {name: template.decode[name].repeated(grown) for name in ("steps", "spans", "kv")}
        sizes = {name: len(template.decode[name].first) for name in columns}
        for name, size in sizes.items():
            columns[name]["step"] = pa.array(np.repeat(self.step + np.arange(count), size))
        columns["steps"]["start_ns"] = pa.array(starts)
        columns["steps"] |= {name: pa.array(times[:, i]) for i, name in enumerate(STEP_TIMES)}
        begin = _stretched(template.starts[chosen], factors)
        columns["spans"]["start_ns"] = pa.array((begin + starts[:, None]).reshape(-1))
        columns["spans"]["host_ns"] = pa.array((_stretched(template.ends[chosen], factors) - begin).reshape(-1))
        first = template.decode["spans"].first
        moved = np.repeat(self.span + np.arange(count) * sizes["spans"], sizes["spans"])
        low = pc.min(first["span"]).as_py()
        columns["spans"]["span"] = pa.array(moved + np.tile(first["span"].to_numpy() - low, count))
        columns["spans"]["parent"] = pc.add(pc.subtract(columns["spans"]["parent"], low), pa.array(moved))
        tables = {
            name: pa.table([found[c] for c in schema.TABLES[name].schema.names], schema=schema.TABLES[name].schema)
            for name, found in columns.items()
        }
        self._write(tables, count, sizes["spans"] * count)

    def _write(self, tables: dict[str, pa.Table], steps: int, spans: int) -> None:
        for name, rows in tables.items():
            self._part(name, rows)
        self._note(tables["spans"])
        self.step, self.span, self.spans = self.step + steps, self.span + spans, self.spans + spans

    def _part(self, name: str, rows: pa.Table) -> None:
        whose = pa.array([self.run_id]).take(pa.array(np.zeros(len(rows), np.int8)))
        self.writer.part(name, _with(rows, run_id=whose))

    def _note(self, spans: pa.Table) -> None:
        """Add up the times of stages and of their parts."""
        spans = spans.filter(pc.is_valid(spans["step"]))
        words = [pc.fill_null(spans[name].cast(pa.string()), "").to_numpy() for name in ("phase", "stage", "part")]
        top, host = pc.is_null(spans["parent"]).to_numpy(), spans["host_ns"].to_numpy()
        for key in set(zip(*(column.tolist() for column in words), strict=True)):
            mine = np.logical_and.reduce([column == word for column, word in zip(words, key, strict=True)])
            for kind, rows in (((*key[:2], None), mine & top), ((*key[:2], key[2]), mine & ~top)):
                if rows.any():
                    self.span_ns[kind] = self.span_ns.get(kind, 0) + int(host[rows].sum())

    def _tokens(self, template: Template, first_step: int, ends: Numbers) -> None:
        tokens = template.tokens
        is_prompt = pc.equal(tokens["source"].cast(pa.string()), "prompt")
        prompt = _with(tokens.filter(is_prompt), step=np.full(pc.sum(is_prompt).as_py(), first_step))
        given = tokens.filter(pc.invert(is_prompt))
        again = given.take(pa.array(self.random.integers(len(given), size=len(ends))))
        number = np.arange(len(ends))
        again = _with(again, step=first_step + number, position=len(prompt) + number, arrival_ns=ends)
        self._part("tokens", pa.concat_tables([prompt, again]).unify_dictionaries())


def _stretched(times: Numbers, factors: Any) -> Numbers:
    """Every time from a step's start, times the step's factor; rounded down, so that order and sums stay."""
    return (times * factors[:, None]).astype(np.int64)


def _parts(wall_ns: Numbers) -> Iterator[slice]:
    """Where the tracer would have flushed: after so much time or so many steps."""
    first, begun = 0, 0
    ends = np.cumsum(wall_ns)
    while first < len(wall_ns):
        last = min(int(np.searchsorted(ends, begun + FLUSH_NS)) + 1, first + FLUSH_STEPS, len(wall_ns))
        yield slice(first, last)
        first, begun = last, int(ends[last - 1])


def _with(rows: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        field = rows.schema.field(name)
        array = values if isinstance(values, pa.ChunkedArray) else pa.array(values)
        rows = rows.set_column(rows.schema.get_field_index(name), field, array.cast(field.type))
    return rows
