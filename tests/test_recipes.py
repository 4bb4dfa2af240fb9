"""The recipes and the notebook of the documentation: run as they stand, their results worked out anew here."""

import contextlib
import io
import json
import re
from collections import defaultdict
from pathlib import Path

import nbformat
import pyarrow.parquet as pq
import pytest

from lifetrace.analysis import read_trace
from lifetrace.analysis.breakdown import breakdown

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "sample_traces" / "smollm2"
# SmolLM2-135M: 30 layers of 576, 3 KV heads of 64, MLP 1536, vocabulary 49,152, tied; 4 bytes a number.
LAYERS, HIDDEN, KV_WIDTH, MLP, VOCABULARY = 30, 576, 192, 1536, 49_152
MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_WIDTH + 3 * HIDDEN * MLP


def rows(name, trace=SAMPLE):
    files = [*sorted(trace.glob(f"{name}/*.parquet")), *trace.glob(f"{name}.parquet")]
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


@pytest.fixture(scope="module")
def printed():
    """What each block of the recipes prints, by the heading that it stands under."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```python")
    namespace, found = {}, {}
    with contextlib.chdir(ROOT):
        for heading, code in blocks:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, heading, "exec"), namespace)
            found[heading] = out.getvalue().splitlines()
    return found


def test_the_slowest_layer_of_each_step(printed):
    layers = defaultdict(list)
    for row in rows("spans"):
        if row["stage"] == "layer" and row["part"] is None:
            layers[row["step"]].append((row["host_ns"], row["layer"]))
    expected = [[str(step), str(max(layers[step])[1]), str(max(layers[step])[0])] for step in range(4)]
    assert [line.split() for line in printed["The slowest layer of each step"][1:]] == expected
    assert {len(found) for found in layers.values()} == {LAYERS}


def test_the_share_of_the_cache(printed):
    weights = 4 * (LAYERS * (MATRICES + 2 * HIDDEN) + HIDDEN + VOCABULARY * HIDDEN + HIDDEN)  # and one embedded row
    activations = {row["kv_len_after"]: row["activation_bytes"] for row in rows("steps") if row["phase"] == "decode"}
    expected = []
    for positions in (5, 67):
        kv = positions * LAYERS * 2 * KV_WIDTH * 4
        expected.append(f"{kv / (kv + weights + activations[positions]):.3%} at {positions} positions")
    assert printed["The KV cache's share of what decode reads and writes"] == expected


def test_time_by_stage_in_sql(printed):
    counted = {row["step"] for row in rows("steps") if not row["warmup"]}
    sums = defaultdict(int)
    for row in rows("spans"):
        if row["parent"] is None and row["step"] in counted:
            sums[row["phase"], row["stage"]] += row["host_ns"]
    expected = []
    for phase in ("decode", "prefill"):
        whole = sum(ns for (of, _), ns in sums.items() if of == phase)
        stages = sorted(((ns, stage) for (of, stage), ns in sums.items() if of == phase), reverse=True)
        expected += [f"{phase} {stage} {ns / 1e6:.3f} ms {ns / whole:.2%}" for ns, stage in stages]
    assert printed["Time by stage, in SQL"] == expected


def test_repeats_in_polars(printed):
    sums = defaultdict(list)
    for row in rows("steps"):
        sums[row["repeat"], row["phase"]].append(row["wall_ns"])
    assert printed["With polars"] == [
        f"repeat {repeat}: {phase}, {len(times)} steps, {sum(times) / 1e6:.3f} ms"
        for (repeat, phase), times in sorted(sums.items())
    ]


def test_several_runs_at_once(printed):
    decode = sorted(row["wall_ns"] for row in rows("steps") if row["phase"] == "decode")
    assert len(decode) % 2 == 1
    run_id = json.loads((SAMPLE / "run.json").read_text())["run_id"]
    lines = printed["Several runs at once"]
    assert len(lines) == 2
    assert f"{run_id}: {decode[len(decode) // 2] / 1e6:.3f} ms a decode step" in lines


def test_a_fleet(printed):
    found = [
        (row.time_ns, trace.meta["run_id"], row.stage)
        for trace in map(read_trace, [SAMPLE, ROOT / "sample_traces" / "demo"])
        for row in breakdown(trace)
        if row.phase == "decode" and row.part is None
    ]
    expected = [f"{run_id}: {stage} {ns / 1e6:.3f} ms a call" for ns, run_id, stage in sorted(found, reverse=True)[:3]]
    assert printed["A fleet, on an engine of its own"] == expected


# -- keys --------------------------------------------------------------------------------------


def documented_keys():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\| `.*\|$", text, re.MULTILINE):
        left, keys, right, _ = (cell.strip() for cell in line.strip("|").split("|"))
        names = re.findall(r"`(\w+)`", keys)
        table, _, column = right.strip("`").partition(".")
        yield left.strip("`"), names, table, [column] if column else names


@pytest.mark.parametrize(("left", "keys", "right", "columns"), list(documented_keys()))
def test_every_documented_key_finds_its_row(left, keys, right, columns):
    demo = ROOT / "sample_traces" / "demo"  # recorded at the finest detail
    held = {tuple(row[name] for name in columns) for row in rows(right, demo)}
    wanted = set()
    for row in rows(left, demo):
        values = [row[name] if isinstance(row[name], list) else [row[name]] for name in keys]
        wanted |= {value for value in zip(*values, strict=True) if None not in value}
    if right == "modules":  # modules without parameters of their own have no row
        wanted, held = held, wanted
    assert wanted <= held
    assert bool(wanted) == ((left, right) not in {("ops", "steps"), ("steps", "steps")})  # this trace has none of these


def test_the_keys_are_those_of_seven_tables():
    tables = {left for left, *_ in documented_keys()} | {right for *_, right, _ in documented_keys()}
    assert tables == {"steps", "spans", "kv", "tokens", "modules", "products", "ops"}


# -- the notebook ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tour():
    return nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)


def test_the_notebook_is_stored_without_outputs(tour):
    nbformat.validate(tour)
    code = [cell for cell in tour.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_runs_and_its_results_are_right(tour, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PLOTLY_RENDERER", "json")
    client = NotebookClient(tour, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    outputs = [cell.outputs for cell in client.execute().cells if cell.cell_type == "code"]
    whole, head, shares, breakdown, roofline, slowest, growth = outputs
    assert "SmolLM2-135M-Instruct" in whole[0].data["text/html"]
    assert "prefill" in head[0].data["text/html"]
    assert float(re.search(r"^layer\s+([\d.]+)$", shares[0].data["text/plain"], re.MULTILINE)[1]) == stage_share(
        "layer"
    )
    for figure in (breakdown, roofline):
        assert figure[0].data["application/json"]["data"]
    layer, ms = re.search(r"layer (\d+) is the slowest: ([\d.]+) ms", slowest[0].text).groups()
    assert (int(layer), ms) == slowest_layer()
    assert growth[0].data["text/plain"] == f"[({LAYERS * 2 * KV_WIDTH * 4},)]"


def stage_share(stage):
    top = [row for row in rows("spans") if row["parent"] is None and row["phase"] == "decode"]
    return round(sum(r["host_ns"] for r in top if r["stage"] == stage) / sum(r["host_ns"] for r in top), 4)


def slowest_layer():
    """The layer whose median over all decode steps is highest, and that median in ms."""
    times = defaultdict(list)
    for row in rows("spans"):
        if row["stage"] == "layer" and row["part"] is None and row["phase"] == "decode":
            times[row["layer"]].append(row["host_ns"])
    medians = {layer: sorted(found)[len(found) // 2] for layer, found in times.items()}
    layer = max(medians, key=medians.get)
    return layer, f"{medians[layer] / 1e6:.3f}"


def test_weights_that_are_offloaded(printed):
    """Of a layer of the embedded model: q, o (192 x 192), k, v (192 x 64), three of 192 x 512, two norms; float16."""
    bytes_ = 2 * (2 * 192 * 192 + 2 * 192 * 64 + 3 * 192 * 512 + 2 * 192)
    assert printed["Weights that are offloaded"] == [
        f"layer {layer}: {bytes_:,} B brought in each decode step" for layer in (4, 5)
    ]
