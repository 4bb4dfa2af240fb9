"""Reads `run.json` from anyone: bounded in size and depth, every value of the kind that readers rely on."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifetrace.errors import TraceError

from . import upgrade

MANIFEST = "run.json"
RANK_FOLDERS = "rank-*"
MAX_BYTES = 64 * 1024 * 1024
# Each may take a hundred bytes of memory, so that a few characters a value are what costs most.
MAX_VALUES = 2_000_000
MAX_DEPTH = 64
MAX_INTEGER = 2**63 - 1
INTEGER, NUMBER, TEXT, FLAG, OBJECT = int, float, str, bool, dict

ANY = "*"  # in place of the keys of an object: whatever they are


@dataclass(frozen=True)
class Needed:
    """The shape of a value that an object does not make sense without."""

    shape: Any


_TENSOR = {"shape": [INTEGER], "dtype": TEXT, "bytes": INTEGER, "role": TEXT, "module": TEXT, "operator": TEXT}
# What a reader relies on: kind of each value, of the values in a list, of the keys of an object. Null may
# stand for each, in a list only where that says so; further keys may be there.
SHAPE: dict[str, Any] = {
    "run_id": TEXT,
    "status": TEXT,
    "error": TEXT,
    "command": TEXT,
    "created": TEXT,
    "wall_clock_ns": INTEGER,
    "model": {
        "id": TEXT, "architecture": TEXT, "model_type": TEXT, "config": OBJECT, "dtype": TEXT, "attention": TEXT,
        "experts": TEXT, "parameters": INTEGER, "weight_bytes": INTEGER, "layers": INTEGER, "embed": TEXT, "head": TEXT,
        "revision": TEXT, "weights": TEXT,
    },
    "device": {"type": TEXT, "name": TEXT, "memory_bytes": INTEGER, "threads": INTEGER},
    "versions": OBJECT,
    "settings": {"detail": TEXT},
    "generation": OBJECT,
    "prompt": [TEXT],
    "output": [TEXT],
    "calls": [
        {
            "call": INTEGER, "kind": TEXT, "repeat": INTEGER, "parent_step": INTEGER, "request_start_ns": INTEGER,
            "start_ns": INTEGER, "end_ns": INTEGER, "first_token_ns": INTEGER, "last_token_ns": INTEGER, "error": TEXT,
            "sequences": INTEGER, "prompt_tokens": [INTEGER], "new_tokens": [INTEGER], "stop_reason": TEXT,
            "stop_reasons": [TEXT, None], "drafted": INTEGER, "accepted": INTEGER,
        }
    ],
    "rank": INTEGER,
    "world_size": INTEGER,
    "job": TEXT,
    "ceilings": OBJECT,
    "overhead": {
        "untraced_s": Needed([NUMBER]), "traced_s": Needed([NUMBER]), "ratio": Needed(NUMBER),
        "ratio_low": Needed(NUMBER), "ratio_high": Needed(NUMBER), "noise": NUMBER, "tokens_identical": FLAG,
    },
    "uncounted": [{"module": TEXT, "operators": [TEXT], "span": TEXT, "share_of_time": NUMBER}],
    "notes": [TEXT],
    "memory": {
        "source": TEXT, "peak_bytes": Needed(INTEGER), "step": INTEGER, "stage": TEXT, "layer": INTEGER, "part": TEXT,
        "module": TEXT, "maker": _TENSOR, "held_after": [_TENSOR], "held_after_bytes": INTEGER,
        "pieces": Needed([{"kind": Needed(TEXT), "stage": TEXT, "part": TEXT, "bytes": Needed(INTEGER)}]),
    },
    "predictions": {
        "rows": Needed([{"key": Needed(TEXT), "name": Needed(TEXT), "unit": TEXT, "formula": TEXT, "value": NUMBER}])
    },
    "post_mortem": {
        "message": TEXT, "asked_bytes": INTEGER, "limit_bytes": INTEGER, "step": INTEGER, "phase": TEXT, "stage": TEXT,
        "layer": INTEGER, "part": TEXT, "module": TEXT, "held": Needed({ANY: INTEGER}),
        "would_fit": {
            "batch": INTEGER, "context": Needed(INTEGER), "needed_bytes": Needed(INTEGER), "largest_batch": INTEGER,
            "largest_context": INTEGER,
            "options": Needed(
                [{"change": Needed(TEXT), "needed_bytes": INTEGER, "spare_bytes": INTEGER, "settings": Needed(OBJECT)}]
            ),
        },
    },
}  # fmt: skip


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a trace in the present format.

    Raises:
        TraceError: there is none, it is damaged, or a newer lifetrace wrote it.
    """
    file = folder / MANIFEST
    if not folder.is_dir():
        raise TraceError(f"There is no folder {folder}; give the path of a trace.")
    if file.is_symlink():
        raise TraceError(f"{file} is a link; lifetrace reads only what lies in the trace's own folder.")
    if not file.is_file() and (partition := next(folder.glob(f"{RANK_FOLDERS}/{MANIFEST}"), None)) is not None:
        raise TraceError(
            f"{folder} holds no trace of rank 0, which the others belong to; read one of them: {partition.parent}."
        )
    if not file.is_file():
        raise TraceError(f"{folder} is no trace: it holds no {MANIFEST}. Give the folder that `lifetrace run` wrote.")
    meta = _parse(file)
    if not isinstance(meta, dict) or type(meta.get("format_version")) is not int:
        raise TraceError(f"{file} is no manifest of lifetrace: it has no format_version.")
    meta = upgrade.manifest(meta, folder)
    _check(meta, SHAPE, "", file)
    return meta


def _parse(file: Path) -> Any:
    if file.stat().st_size > MAX_BYTES:
        raise TraceError(f"{file} is larger than {MAX_BYTES} bytes; a manifest of lifetrace never is.")
    try:
        text = file.read_text(encoding="utf-8")
        if sum(map(text.count, ",[{")) > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        meta = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded)
        _check_depth(meta)
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{file} cannot be read as JSON: {error}. The trace's Parquet files may still be whole."
        ) from None
    return meta


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("it holds a number too large for any measurement")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > 20 or abs(value := int(digits)) > MAX_INTEGER:
        raise ValueError("it holds an integer of more than 64 bits")
    return value


def _check_depth(meta: Any) -> None:
    level = [meta]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _inside(value)]
        if not level:
            return
    raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check(value: Any, shape: Any, where: str, file: Path) -> None:
    """Raise TraceError for a value of another kind; keys that an object lacks are null in it from here on."""
    if value is None:
        if isinstance(shape, Needed):
            raise TraceError(f"{file} is damaged: {where} is missing.")
        return
    if isinstance(shape, dict):
        _check_kind(value, dict, where, file)
        for key, inner in ((key, shape[ANY]) for key in value) if ANY in shape else shape.items():
            _check(value.setdefault(key, None), inner, f"{where}.{key}" if where else key, file)
    elif isinstance(shape, Needed):
        _check(value, shape.shape, where, file)
    elif isinstance(shape, list):
        _check_kind(value, list, where, file)
        for number, item in enumerate(value):
            if item is None and None not in shape:
                raise TraceError(f"{file} is damaged: {where}[{number}] is empty.")
            _check(item, shape[0], f"{where}[{number}]", file)
    else:
        _check_kind(value, shape, where, file)


def _check_kind(value: Any, kind: type, where: str, file: Path) -> None:
    fits = type(value) in (int, float) if kind is NUMBER else type(value) is kind
    if not fits:
        raise TraceError(f"{file} is damaged: {where} is a {type(value).__name__}, not a {kind.__name__}.")
