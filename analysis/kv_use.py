"""What the KV cache of a call was used for: positions, padding, slots without use, and its own copying."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .kv_form import WHOLE, KVForm, kv_form
from .trace import Trace


@dataclass(frozen=True)
class KVUse:
    """The cache after the last step of the last call; bytes are null where they are not known.

    `unused_bytes` are held and hold no position (a static cache's free slots); `padding_bytes`
    hold padding of the prompts. `copied_bytes` is what the cache class moved besides, over the whole
    call: one that grows by `torch.cat` reads and writes all it holds at each append, and holds a
    layer twice for a moment: `double_bytes`, of its largest layer. `apart` counts the layers of steps
    whose bytes are not those of the closed form, of `checked` in all; null where there is no form.
    """

    bytes_: int | None
    positions: int | None
    unused_bytes: int | None
    padding_bytes: int | None
    copied_bytes: int | None
    double_bytes: int | None
    checked: int | None
    apart: int | None

    @property
    def padding_share(self) -> float | None:
        """Padding's part of the bytes that are filled."""
        return self.padding_bytes / self.bytes_ if self.padding_bytes is not None and self.bytes_ else None


def kv_use(trace: Trace) -> KVUse | None:
    """What the last call's cache was used for; null where a trace has no step with one."""
    steps = _last_call(trace)
    last = steps.take([len(steps) - 1]).to_pylist()[0] if len(steps) else {}
    if not last.get("kv_bytes"):
        return None
    held, copies = last["kv_allocated_bytes"], steps["kv_copy_bytes"]
    copied = None if copies.null_count else pc.sum(copies).as_py()
    checked, apart = _against(trace, kv_form(trace))
    return KVUse(
        bytes_=last["kv_bytes"],
        positions=last["kv_len_after"],
        unused_bytes=held - last["kv_bytes"] if held is not None else None,
        padding_bytes=_padding_bytes(trace, last),
        copied_bytes=copied,
        double_bytes=_largest_layer(trace, last["step"]) if copied else copied,
        checked=checked,
        apart=apart,
    )


def _last_call(trace: Trace) -> pa.Table:
    """The main steps of the last call at the top level, in order."""
    names = ["step", "call", "role", "parent_step", "discarded", "batch", "kv_len_after", "kv_bytes"]
    steps = trace.table("steps", [*names, "kv_allocated_bytes", "kv_copy_bytes"])
    is_used = pc.and_(pc.is_null(steps["parent_step"]), pc.invert(pc.fill_null(steps["discarded"], False)))
    main = steps.filter(pc.and_(pc.equal(steps["role"], "main"), is_used))
    return main.filter(pc.equal(main["call"], pc.max(main["call"]))).sort_by("step")


def _padding_bytes(trace: Trace, last: dict[str, Any]) -> int | None:
    """Bytes of the prompts' padding: its positions times what a position of one sequence takes on average."""
    positions = (last["batch"] or 0) * (last["kv_len_after"] or 0)
    kinds = set(pc.unique(trace.table("kv", ["kind"])["kind"]).to_pylist())
    if not positions or not kinds or not kinds <= WHOLE:
        return None
    tokens = trace.table("tokens").select(["call", "sequence", "source", "kept"])
    of_call = tokens.filter(pc.and_(pc.equal(tokens["call"], last["call"]), _is(tokens["source"], "prompt")))
    if not len(of_call) or of_call["kept"].null_count:
        return None
    padding = len(of_call) - pc.sum(of_call["kept"]).as_py()
    beams = last["batch"] / pc.count_distinct(of_call["sequence"]).as_py()  # each holds its prompt's padding
    return round(last["kv_bytes"] / positions * padding * beams)


def _is(column: pa.ChunkedArray, word: str) -> pa.ChunkedArray:
    return pc.equal(column.cast(pa.string()), word)


def _largest_layer(trace: Trace, step: int) -> int | None:
    kv = trace.table("kv", ["step", "logical_bytes"])
    largest: int | None = pc.max(kv.filter(pc.equal(kv["step"], step))["logical_bytes"]).as_py()
    return largest


def _against(trace: Trace, form: KVForm | None) -> tuple[int | None, int | None]:
    """How many layers of steps there are, and how many of them differ from batch × length × bytes of a position."""
    if form is None:
        return None, None
    steps = trace.table("steps", ["step", "batch"])
    rows = trace.table("kv", ["step", "length", "logical_bytes"])
    place = pc.index_in(rows["step"], value_set=steps["step"].combine_chunks())
    batch = steps["batch"].take(place)
    held = pc.multiply(pc.multiply(rows["length"].cast(pa.int64()), batch), form.position_bytes // form.layers)
    same = pc.equal(rows["logical_bytes"], held)
    return pc.count(same).as_py(), pc.sum(pc.invert(same)).as_py() or 0
