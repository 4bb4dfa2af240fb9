"""The walk through one layer of one step: every module and every product, with this run's own shapes.

What people draw by hand to teach a transformer, filled with what was measured: operand shapes,
FLOPs, bytes, time and bound of each piece, the activations that live for a moment, and the keys
and values that stay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lifetrace.errors import UsageError

from . import ceilings as ceilings_module
from .ceilings import Ceilings
from .roofline import ITEM_BYTES, Verdict, model_dtype, verdict, working_set
from .schema import COMMUNICATION, is_aside
from .trace import Trace

ROLES = ("scores", "weighted sum")  # of attention's own two products
DIMENSIONS = ("m", "n", "k", "batch", "flops", "operand_bytes")
SPAN_COLUMNS = (
    "span", "parent", "step", "stage", "layer", "part", "module", "class_name", "call_index", "start_ns", "host_ns",
    "device_ns", "input_shape", "output_shape", "dtype", "input_bytes", "output_bytes", "weight_bytes",
    "kv_read_bytes", "kv_write_bytes", "kv_copy_bytes", "flops", "flops_dense", "op_count",
)  # fmt: skip
STEP_COLUMNS = (
    "step", "phase", "batch", "q_len", "kv_len_before", "kv_len_after", "weight_bytes", "kv_bytes", "wall_ns",
)  # fmt: skip


@dataclass(frozen=True)
class Matmul:
    """One product, left [batch, m, k] by right [batch, k, n]; `result_bytes` are of [batch, m, n].

    `role` is `scores` and `weighted sum` for the two products of attention, else null. `verdict`
    holds the times at the device's ceilings; its measured part is null unless the product's module
    was timed by itself.
    """

    module: str
    role: str | None
    m: int
    n: int
    k: int
    batch: int
    flops: int
    operand_bytes: int
    result_bytes: int | None
    verdict: Verdict


@dataclass(frozen=True)
class Piece:
    """One recorded call inside the layer (the layer itself has depth 0), and the products that ran in it."""

    depth: int
    part: str | None
    module: str | None
    class_name: str | None
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    dtype: str | None
    time_ns: int
    flops: int | None
    bytes_: int | None
    weight_bytes: int | None
    op_count: int | None
    verdict: Verdict
    matmuls: tuple[Matmul, ...]


@dataclass(frozen=True)
class Scores:
    """The attention score matrix [batch × heads, queries, keys] of this layer in this step.

    `written` says whether this run's attention implementation wrote it to memory; flash and SDPA
    kernels keep it in registers, a tile at a time. Null where the implementation is not known to do either.
    """

    shape: tuple[int, int, int]
    bytes_: int
    written: bool | None
    implementation: str | None


@dataclass(frozen=True)
class LayerKV:
    """The cache of this layer after the step, and what the step moved of it."""

    kind: str
    length: int | None
    logical_bytes: int | None
    allocated_bytes: int | None
    dtype: str | None
    read_bytes: int | None
    write_bytes: int | None
    copy_bytes: int | None


@dataclass(frozen=True)
class Walk:
    """One layer of one step. `transient_bytes`: results of its products that were written and then dropped."""

    step: int
    phase: str
    layer: int
    batch: int | None
    q_len: int | None
    kv_len_before: int | None
    kv_len_after: int | None
    pieces: list[Piece]
    scores: Scores | None
    kv: LayerKV | None
    transient_bytes: int | None
    ceilings_source: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists; each bound is a word under `bound`."""
        whole = asdict(self)
        for piece in whole["pieces"]:
            piece["bytes"] = piece.pop("bytes_")
            piece |= piece.pop("verdict")
            for matmul in piece["matmuls"]:
                matmul |= matmul.pop("verdict")
        if whole["scores"]:
            whole["scores"]["bytes"] = whole["scores"].pop("bytes_")
        return whole


def explain_layer(trace: Trace, step: int, layer: int) -> Walk:
    """Walk through a layer of a step.

    Raises:
        UsageError: the trace has no such step or layer, or did not record that step's spans.
    """
    facts = _step(trace, step)
    spans = _layer_spans(trace, step, layer)
    ceilings, _ = ceilings_module.of_manifest(trace.meta)
    judge = _Judge(ceilings, model_dtype(trace), working_set(trace, facts))
    matmuls = _matmuls(trace, facts, spans, judge)
    pieces = _pieces(spans, matmuls, judge)
    scores = _scores(trace, matmuls)
    return Walk(
        step=step,
        phase=facts["phase"],
        layer=layer,
        batch=facts["batch"],
        q_len=facts["q_len"],
        kv_len_before=facts["kv_len_before"],
        kv_len_after=facts["kv_len_after"],
        pieces=pieces,
        scores=scores,
        kv=_layer_kv(trace, step, layer, spans[0]),
        transient_bytes=_transient(matmuls, scores),
        ceilings_source=ceilings.source if ceilings else None,
    )


@dataclass(frozen=True)
class _Judge:
    ceilings: Ceilings | None
    dtype: str
    working_set_bytes: float | None

    def __call__(
        self, flops: int | None, bytes_: int | None, op_count: int | None = None, measured_ns: int | None = None
    ) -> Verdict:
        return verdict(flops, bytes_, op_count, measured_ns, self.ceilings, self.dtype, self.working_set_bytes)


def _step(trace: Trace, step: int) -> dict[str, Any]:
    steps = trace.table("steps").select(list(STEP_COLUMNS))
    rows = steps.filter(pc.equal(steps["step"], step)).to_pylist()
    if not rows:
        last = max(steps["step"].to_pylist(), default=None)
        has = f"it has steps 0 to {last}" if last is not None else "it has none"
        raise UsageError(f"The trace {trace.path} has no step {step}; {has}.")
    return rows[0]


def _layer_spans(trace: Trace, step: int, layer: int) -> list[dict[str, Any]]:
    """The layer's own row first, then all rows inside it, by start."""
    spans = trace.table("spans").select(list(SPAN_COLUMNS))
    of_step = spans.filter(pc.equal(spans["step"], step))
    if not len(of_step):
        raise UsageError(f"The spans of step {step} were not recorded; {_recorded(spans)}.")
    rows = [row for row in of_step.to_pylist() if row["stage"] == "layer" and row["layer"] == layer]
    own = [row for row in rows if row["part"] is None]
    if not own:
        known = sorted({row["layer"] for row in of_step.to_pylist() if row["stage"] == "layer"})
        has = f"it has layers {known[0]} to {known[-1]}" if known else "it has none"
        raise UsageError(f"Step {step} of the trace {trace.path} has no layer {layer}; {has}.")
    inside = [row for row in rows if row is not own[0]]
    return [own[0], *sorted(inside, key=lambda row: (row["start_ns"], -row["host_ns"]))]


def _recorded(spans: pa.Table) -> str:
    steps = sorted(step for step in spans["step"].unique().to_pylist() if step is not None)
    if not steps:
        return "the trace holds the spans of none"
    named = ", ".join(map(str, steps[:8]))
    return f"recorded are {named}" + (" and so on" if len(steps) > 8 else "")


# -- products ----------------------------------------------------------------------------------


def _matmuls(trace: Trace, step: dict[str, Any], spans: list[dict[str, Any]], judge: _Judge) -> list[Matmul]:
    """The products of the layer in this step; between two counted lengths they lie on a line."""
    layer = spans[0]
    timed = {(row["module"], row["call_index"]): _time_ns(row) for row in _calls(spans)}
    item_bytes = ITEM_BYTES.get(layer["dtype"] or "")
    rows = _in_order(_products_at(trace, step), layer["module"], layer["call_index"])
    if layer["flops_dense"] not in (None, sum(row["flops"] for row in rows)):
        return []  # on a line that leads past a bend, such as where a window fills
    attention = set(_attentions(rows, step["q_len"]))
    found = []
    for row in rows:
        at = (row["module"], row["call_index"])
        alone = row["product_count"] == 1
        role = ROLES[row["order"]] if at in attention else None
        result = prod((row["batch"], row["m"], row["n"])) * item_bytes if item_bytes is not None else None
        judged = judge(row["flops"], row["operand_bytes"], None, timed.get(at) if alone else None)
        sizes = {name: row[name] for name in DIMENSIONS}
        found.append(Matmul(row["module"], role, result_bytes=result, verdict=judged, **sizes))
    return found


def _calls(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of modules, without what only comes between them under a module's name."""
    return [row for row in spans if row["module"] is not None and not is_aside(row["part"])]


def _attentions(rows: list[dict[str, Any]], q_len: int | None) -> Iterator[tuple[str, int]]:
    """The calls with attention's two products: queries by keys, then weights by values, over the same keys."""
    for scores, mixed in pairwise(rows):
        at = (scores["module"], scores["call_index"])
        in_order = (scores["order"], mixed["order"]) == (0, 1) and scores["product_count"] == 2
        one_call = at == (mixed["module"], mixed["call_index"]) and in_order
        same = scores["batch"] == mixed["batch"] and scores["n"] == mixed["k"] and scores["m"] == mixed["m"] == q_len
        if one_call and same:
            yield at


def _in_order(rows: list[dict[str, Any]], layer: str, call_index: int) -> list[dict[str, Any]]:
    """A layer's products as they ran: what a module does itself comes before the last module inside it."""
    mine = [
        row
        for row in rows
        if row["call_index"] == call_index and (row["module"] == layer or row["module"].startswith(f"{layer}."))
    ]
    ordered: list[dict[str, Any]] = []
    modules = list(dict.fromkeys(row["module"] for row in mine))
    outer = [name for name in modules if any(other.startswith(f"{name}.") for other in modules)]
    for name in modules:
        own = [row | {"product_count": sum(r["module"] == name for r in mine)} for row in mine if row["module"] == name]
        if name not in outer:
            ordered += own
    for name in outer:
        own = [row | {"product_count": sum(r["module"] == name for r in mine)} for row in mine if row["module"] == name]
        last = max(i for i, row in enumerate(ordered) if row["module"].startswith(f"{name}."))
        ordered[last:last] = own
    return ordered


def _products_at(trace: Trace, step: dict[str, Any]) -> list[dict[str, Any]]:
    """The products of a step: as counted, or on the line between the nearest lengths counted on both sides."""
    by_counted: dict[tuple[int, tuple[int, ...]], list[dict[str, Any]]] = {}
    for row in trace.table("products").to_pylist():
        by_counted.setdefault((row["signature"], tuple(row["steps"])), []).append(row)
    direct = next((rows for (_, steps), rows in by_counted.items() if step["step"] in steps), None)
    if direct is not None or step["kv_len_before"] is None:
        return direct or []
    shape_of = {row["step"]: row for row in trace.table("steps").select(list(STEP_COLUMNS)).to_pylist()}
    at = step["kv_len_before"]
    below, above = None, None
    for (_, steps), rows in by_counted.items():
        known = shape_of.get(steps[0]) if steps else None
        if known is None or (known["batch"], known["q_len"]) != (step["batch"], step["q_len"]):
            continue
        length = known["kv_len_before"]
        if length < at and (below is None or length > below[0]):
            below = (length, rows)
        if length > at and (above is None or length < above[0]):
            above = (length, rows)
    return _between(below, above, at) if below is not None and above is not None else []


def _between(
    below: tuple[int, list[dict[str, Any]]], above: tuple[int, list[dict[str, Any]]], at: int
) -> list[dict[str, Any]]:
    (low, first), (high, last) = below, above
    if [row["module"] for row in first] != [row["module"] for row in last]:
        return []
    return [
        a | {name: a[name] + (b[name] - a[name]) * (at - low) // (high - low) for name in DIMENSIONS}
        for a, b in zip(first, last, strict=True)
    ]


# -- pieces ------------------------------------------------------------------------------------


def _time_ns(row: dict[str, Any]) -> int:
    return int(row["device_ns"] if row["device_ns"] is not None else row["host_ns"])


def _pieces(spans: list[dict[str, Any]], matmuls: Sequence[Matmul], judge: _Judge) -> list[Piece]:
    depth = {spans[0]["span"]: 0}
    for row in spans[1:]:
        depth[row["span"]] = depth.get(row["parent"], 0) + 1
    homes = [(row["span"], row["module"]) for row in _calls(spans)]
    in_span: dict[int, list[Matmul]] = {}
    for matmul in matmuls:
        in_span.setdefault(_home(matmul, homes, spans), []).append(matmul)
    return [_piece(row, depth[row["span"]], in_span.get(row["span"], []), judge) for row in spans]


def _home(matmul: Matmul, homes: Sequence[tuple[int, str]], spans: Sequence[dict[str, Any]]) -> int:
    """The innermost recorded row that a product ran in; attention's own products have one of theirs where recorded."""
    inside = [(len(name), span) for span, name in homes if (matmul.module + ".").startswith(name + ".")]
    span = max(inside)[1]
    core = next((row["span"] for row in spans if row["part"] == "attention_core" and row["parent"] == span), None)
    return core if core is not None and matmul.role is not None else span


def _piece(row: dict[str, Any], depth: int, matmuls: Sequence[Matmul], judge: _Judge) -> Piece:
    parts = [row[name] for name in ("input_bytes", "output_bytes", "weight_bytes", "kv_read_bytes", "kv_write_bytes")]
    bytes_ = needed = None if None in parts else sum(parts)
    if is_aside(row["part"]):  # what is brought comes from elsewhere than the device's memory
        is_talk = row["part"].endswith(COMMUNICATION)  # whose bytes nobody counts
        bytes_, needed = None if is_talk else row["weight_bytes"], None
    time_ns = _time_ns(row)
    return Piece(
        depth=depth,
        part=row["part"],
        module=row["module"],
        class_name=row["class_name"],
        input_shape=tuple(row["input_shape"]) if row["input_shape"] is not None else None,
        output_shape=tuple(row["output_shape"]) if row["output_shape"] is not None else None,
        dtype=row["dtype"],
        time_ns=time_ns,
        flops=row["flops"],
        bytes_=bytes_,
        weight_bytes=row["weight_bytes"],
        op_count=row["op_count"],
        verdict=judge(row["flops"], needed, row["op_count"], time_ns),
        matmuls=tuple(matmuls),
    )


# -- what is written, what stays ---------------------------------------------------------------


def _scores(trace: Trace, matmuls: Sequence[Matmul]) -> Scores | None:
    matmul = next((matmul for matmul in matmuls if matmul.role == "scores"), None)
    if matmul is None or matmul.result_bytes is None:
        return None
    name = (trace.meta.get("model") or {}).get("attention")
    written = {"eager": True, "sdpa": False}.get(str(name), False if "flash" in str(name) else None)
    return Scores((matmul.batch, matmul.m, matmul.n), matmul.result_bytes, written, name)


def _transient(matmuls: Sequence[Matmul], scores: Scores | None) -> int | None:
    """Bytes of the products' results; the score matrix only where it is written."""
    counted = [m.result_bytes for m in matmuls if m.role != "scores" or scores is None or scores.written is not False]
    return None if not counted or None in counted else sum(size for size in counted if size is not None)


def _layer_kv(trace: Trace, step: int, layer: int, span: dict[str, Any]) -> LayerKV | None:
    table = trace.table("kv")
    rows = table.filter(pc.and_(pc.equal(table["step"], step), pc.equal(table["layer"], layer))).to_pylist()
    if not rows:
        return None
    row = rows[0]
    return LayerKV(
        kind=row["kind"],
        length=row["length"],
        logical_bytes=row["logical_bytes"],
        allocated_bytes=row["allocated_bytes"],
        dtype=row["dtype"],
        read_bytes=span["kv_read_bytes"],
        write_bytes=span["kv_write_bytes"],
        copy_bytes=span["kv_copy_bytes"],
    )
