"""The same query on one trace and on a fleet: in memory, and lazily on other engines."""

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from large_trace import SAMPLE, write_large
from stored_traces import one_call

from lifetrace.analysis import queries, read_trace
from lifetrace.analysis.breakdown import breakdown
from lifetrace.analysis.roofline import phase_verdicts

dask = pytest.importorskip("dask.dataframe")
# narwhals means to move what it knows of Dask into a package of its own
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dask support is moving out of Narwhals:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame.reset_index"),
]

DEMO = SAMPLE.parent / "demo"
TABLES = ("spans", "steps")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Three runs of as many kinds: recorded at two details, and one of many short part files."""
    folder = tmp_path_factory.mktemp("fleet")
    for sample in (SAMPLE, DEMO):
        (folder / sample.name).symlink_to(sample)
    write_large(folder / "large", 10_000)
    return folder


def on_pandas(fleet):
    runs = [read_trace(path) for path in sorted(fleet.iterdir())]
    return [pd.concat([getattr(run, name) for run in runs], ignore_index=True) for name in TABLES]


def on_pyarrow(fleet):
    runs = [read_trace(path) for path in sorted(fleet.iterdir())]
    return [pa.concat_tables([run.table(name) for run in runs]).unify_dictionaries() for name in TABLES]


def on_duckdb(fleet):
    return [duckdb.sql(f"SELECT * FROM '{fleet}/*/{name}/*.parquet'") for name in TABLES]


def on_dask(fleet):
    return [
        dask.read_parquet([str(file) for file in sorted(fleet.glob(f"*/{name}/*.parquet"))], dtype_backend="pyarrow")
        for name in TABLES
    ]


ENGINES = {"pandas": on_pandas, "pyarrow": on_pyarrow, "duckdb": on_duckdb}
if int(pd.__version__.split(".")[0]) >= 3:  # Dask on pandas 2 fails in pandas' own grouping by words that may be null
    ENGINES["dask"] = on_dask
QUERIES = {
    "breakdown": queries.breakdown,
    "step_stages": lambda spans, steps: queries.step_stages(spans, work=queries.SPAN_WORK),
    "phase_totals": lambda spans, steps: queries.phase_totals(steps),
    "steps_per_call": lambda spans, steps: queries.steps_per_call(steps),
    "places": lambda spans, steps: queries.places(spans, queries.counted_steps(steps).to_native()),
    "call_stages": lambda spans, steps: queries.call_stages(
        queries.step_stages(spans).to_native(), queries.counted_steps(steps).to_native()
    ),
}


def rows_of(frame):
    """Rows in an order of their own, missing sums of nothing as 0 and whole numbers as such."""
    names = frame.collect_schema().names()
    table = frame.collect("pyarrow").to_native().select(names)  # Dask's frames have an index beside their columns
    columns = [[None if value != value else value for value in column.to_pylist()] for column in table.columns]
    return names, sorted(zip(*columns, strict=True), key=lambda row: [str(value) for value in row[:7]])


@pytest.mark.parametrize("query", QUERIES)
def test_every_engine_gives_the_same_table(fleet, query):
    names, expected = rows_of(QUERIES[query](*on_pandas(fleet)))
    assert {row[0] for row in expected} == {read_trace(path).meta["run_id"] for path in fleet.iterdir()}
    for engine, read in ENGINES.items():
        found_names, found = rows_of(QUERIES[query](*read(fleet)))
        assert found_names == names, engine
        assert len(found) == len(expected), engine
        for one, other in zip(found, expected, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                if isinstance(theirs, float):
                    assert mine == pytest.approx(theirs, rel=1e-9), engine
                else:
                    assert mine == theirs, engine


def test_a_fleet_says_of_each_run_what_show_says_of_it(fleet):
    rows = queries.breakdown(*on_duckdb(fleet)).collect("pyarrow").to_native().to_pylist()
    totals = queries.phase_totals(on_duckdb(fleet)[1]).collect("pyarrow").to_native().to_pylist()
    for trace in map(read_trace, fleet.iterdir()):
        mine = {(r["phase"], r["stage"], r["part"]): r for r in rows if r["run_id"] == trace.meta["run_id"]}
        shown = breakdown(trace)
        assert set(mine) == {(row.phase, row.stage, row.part) for row in shown}
        for row in shown:
            found = mine[row.phase, row.stage, row.part]
            assert found["count"] == row.count
            assert found["time_ns"] == pytest.approx(row.time_ns, rel=1e-12)
            assert found["share"] == pytest.approx(row.share, rel=1e-12)
        steps = {row["phase"]: row["steps"] for row in totals if row["run_id"] == trace.meta["run_id"]}
        assert steps == {row.phase: row.steps for row in phase_verdicts(trace, None)}


def test_ranks_are_told_apart(tmp_path):
    """Both ranks number their steps and spans alike: joined by those alone, each row would count four times."""
    trace = read_trace(one_call(tmp_path / "t"))
    spans, steps = (trace.table(name) for name in TABLES)
    both = [_of_rank(rows, 0, 1) for rows in (spans, steps)]
    rows = queries.breakdown(*both, by=("rank",)).collect("pyarrow").to_native().to_pylist()
    alone = queries.breakdown(spans, steps, by=()).collect("pyarrow").to_native().to_pylist()
    for rank in (0, 1):
        mine = [{k: v for k, v in row.items() if k != "rank"} for row in rows if row["rank"] == rank]
        assert sorted(mine, key=str) == sorted(alone, key=str)


def _of_rank(rows, *ranks):
    index = rows.column_names.index("rank")
    field = rows.schema.field("rank")
    return pa.concat_tables([rows.set_column(index, field, pa.array([rank] * len(rows), pa.int32())) for rank in ranks])


def test_steps_that_lie_in_two_files_are_whole(tmp_path):
    """No writer does that, but a file may have been cut up: a span is not in the file of its parent then."""
    import pyarrow.parquet as pq

    folder = one_call(tmp_path / "t")
    expected = breakdown(read_trace(folder))
    file = folder / "spans" / "part-00000.parquet"
    rows = pq.ParquetFile(file).read()
    is_inside = pc.is_valid(rows["parent"])
    pq.write_table(rows.filter(pc.invert(is_inside)), file)
    pq.write_table(rows.filter(is_inside), file.with_name("part-00001.parquet"))
    assert breakdown(read_trace(folder)) == expected
