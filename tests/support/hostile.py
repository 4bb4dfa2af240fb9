"""Traces as a stranger might send them: whole ones, damaged in a way that hypothesis chooses; and what reads them."""

import contextlib
import io
import json
import os
import shutil
import traceback
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from stored_traces import one_call

from lifetrace.analysis import schema
from lifetrace.cli import UNEXPECTED, main

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "demo"
COMMANDS = ("show", "json", "csv", "markdown", "report", "explain", "compare", "export", "plan")

BIG = 10**7
MOST_BYTES = 2 * 10**9  # in memory, of what is made here
ODD_TEXTS = (
    "", "\x1b]0;title\x07\x1b[2J", "</script><script>alert(1)</script>", "=HYPERLINK(1)", "\ud800", "\u202egnp.exe",
    "../../etc/passwd", "a" * 70_000, "[bold red]x[/]", "{{ 7 * 7 }}", "\x00", "\r\n\r\n",
)  # fmt: skip
ODD_INTEGERS = (0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64, 10**30)
odd_numbers = st.sampled_from((0.0, -0.0, 1e308, -1e308, 1e-320, float("inf"), float("nan"))) | st.floats()
odd_values = (
    st.none()
    | st.booleans()
    | st.sampled_from(ODD_INTEGERS)
    | st.integers()
    | odd_numbers
    | st.sampled_from(ODD_TEXTS)
    | st.text(max_size=20)
    | st.sampled_from(([], {}, [[]], [None], [{}], {"a": {"b": [1]}}))
)


def whole_traces(folder: Path) -> list[Path]:
    """The traces that are damaged: a small one with known numbers, and a real one."""
    one_call(folder / "small")
    shutil.copytree(SAMPLE, folder / "real")
    return [folder / "small", folder / "real"]


# -- damage ------------------------------------------------------------------------------------


def damaged(draw, trace: Path, folder: Path) -> list[str]:
    """Copy a trace into a folder and damage it, once or twice; returns how."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trace, folder)
    how = [_damage(draw, folder)]
    if draw(st.booleans()):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, pa.ArrowException):
            how.append(_damage(draw, folder))  # not every damage can be done to what is damaged already
    return how


def _damage(draw, folder: Path) -> str:
    kinds = ["manifest", "manifest", "text", "column", "column", "values", "values", "bytes", "folder"]
    kind = draw(st.sampled_from(kinds if all(map(_is_whole, (folder / "run.json", *_tables(folder)))) else ["folder"]))
    return kind + ": " + {
        "manifest": _damage_manifest,
        "text": _damage_manifest_text,
        "column": _damage_column,
        "values": _damage_values,
        "bytes": _damage_bytes,
        "folder": _damage_folder,
    }[kind](draw, folder)  # fmt: skip


def _damage_manifest(draw, folder: Path) -> str:
    meta = json.loads((folder / "run.json").read_text())
    place, key = meta, draw(st.sampled_from(sorted(meta)))
    path = [key]
    while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
        place = place[key]
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        path.append(key)
    value = draw(odd_values)
    if isinstance(place, dict) and draw(st.integers(0, 5)) == 0:
        del place[key]
        value = "nothing"
    else:
        place[key] = value
    (folder / "run.json").write_text(json.dumps(meta))
    return f"{path} becomes {value!r:.60}"


def _damage_manifest_text(draw, folder: Path) -> str:
    file = folder / "run.json"
    data = file.read_bytes()
    kind = draw(st.sampled_from(("cut", "flip", "deep", "long", "wide", "twice", "version")))
    if kind == "cut":
        data = data[: draw(st.integers(0, len(data)))]
    elif kind == "flip":
        data = _flipped(draw, data)
    elif kind == "deep":
        depth = draw(st.sampled_from((60, 100, 900, 5_000, 200_000)))
        opening, closing = draw(st.sampled_from(((b"[", b"]"), (b'{"a":', b"1}"))))
        data = _with_value(data, opening * depth + (b"1" if opening != b"[" else b"") + closing[-1:] * depth)
    elif kind == "long":
        data = data.replace(b'"status": "complete"', b'"status": "' + b"x " * BIG + b'"')
    elif kind == "wide":
        data = _with_value(data, b"[" + b"[]," * BIG + b"1]")
    elif kind == "twice":
        data = data + data
    else:
        version = draw(st.sampled_from((b"0", b"2", b"99", b"-1", b"true", b"1.0", b'"1"', b"null", b"1e3")))
        data = data.replace(b'"format_version": 1', b'"format_version": ' + version)
    file.write_bytes(data)
    return kind


def _with_value(manifest: bytes, value: bytes) -> bytes:
    """The manifest with one more key."""
    return manifest.replace(b'"format_version"', b'"x": ' + value + b', "format_version"')


def _is_whole(path: Path) -> bool:
    """Whether it is a file that can be damaged further."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        if path.name == "run.json":
            return isinstance(json.loads(path.read_bytes()), dict)
        return bool(pq.read_table(path, schema=_table_of(path).schema, partitioning=None).num_columns)
    except (OSError, ValueError, RecursionError, pa.ArrowException):
        return False


def _tables(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def _table_of(file: Path) -> schema.Table:
    return schema.TABLES[file.stem if file.stem in schema.TABLES else file.parent.name]


def _damage_column(draw, folder: Path) -> str:
    """A column goes, is there twice, or holds something else."""
    file = draw(st.sampled_from(_tables(folder)))
    rows = pq.ParquetFile(file).read()
    name = draw(st.sampled_from(rows.column_names))
    index = rows.column_names.index(name)
    kind = draw(st.sampled_from(("drop", "twice", "nulls", "type", "nested", "empty", "rename")))
    size = len(rows)
    if kind == "drop":
        rows = rows.drop_columns([name])
    elif kind == "twice":
        rows = rows.append_column(name, rows[name])
    elif kind == "nulls":
        rows = rows.set_column(index, name, pa.nulls(size, rows.schema.field(name).type))
    elif kind == "type":
        others = (pa.string(), pa.float64(), pa.int8(), pa.bool_(), pa.binary(), pa.timestamp("ns"))
        value = pa.array(draw(st.sampled_from((["1"], [None])))).cast(pa.string())
        type_ = draw(st.sampled_from(others))
        with contextlib.suppress(pa.ArrowException):
            value = value.cast(type_)
        rows = rows.set_column(index, name, value.take(pa.array([0] * size, pa.int64())))
    elif kind == "nested":
        value = {"a": [[1]]}
        for _ in range(draw(st.integers(0, 20))):
            value = {"a": [value]}
        rows = rows.set_column(index, name, pa.array([value] * size))
    elif kind == "empty":
        rows = rows.slice(0, 0)
    else:
        rows = rows.rename_columns([f"{c}\x1b[31m" if c == name else c for c in rows.column_names])
    _write(rows, file)
    return f"{file.parent.name}/{file.name} {name} {kind}"


def _damage_values(draw, folder: Path) -> str:
    """Some values of a column of the right type become absurd, or all of its rows do."""
    file = draw(st.sampled_from(_tables(folder)))
    rows = pq.read_table(file, schema=_table_of(file).schema, partitioning=None)
    name = draw(st.sampled_from(rows.column_names))
    type_ = rows.schema.field(name).type
    values = rows[name].to_pylist()
    value = draw(_value_of(type_))
    some = st.sets(st.integers(0, max(len(values) - 1, 0)), max_size=min(len(values), 4))
    chosen = range(len(values)) if draw(st.booleans()) else draw(some)
    for number in chosen:
        values[number] = value
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    array = pa.array(values, type=plain)
    rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), array.cast(type_))
    if draw(st.integers(0, 5)) == 0:
        rows = pa.concat_tables([rows, rows])
    copies = draw(st.sampled_from((1000, 100_000))) if draw(st.integers(0, 9)) == 0 else 0
    if copies and len(rows) and rows[:1].nbytes * copies < MOST_BYTES:  # it may hold a bomb already
        rows = rows.take(pa.array([0] * copies))
    _write(rows, file)
    return f"{file.parent.name}/{file.name} {name} becomes {value!r:.60} in {len(list(chosen))} rows"


def _value_of(type_: pa.DataType) -> st.SearchStrategy:
    if pa.types.is_dictionary(type_) or pa.types.is_string(type_):
        texts = st.sampled_from(tuple(text for text in ODD_TEXTS if text != "\ud800"))
        return st.none() | texts | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    if pa.types.is_list(type_):
        return st.none() | st.lists(_value_of(type_.value_type).filter(lambda v: v is not None), max_size=12)
    if pa.types.is_boolean(type_):
        return st.none() | st.booleans()
    if pa.types.is_floating(type_):
        return st.none() | st.floats(width=32 if type_ == pa.float32() else 64)
    high = 2 ** (type_.bit_width - 1) - 1
    return st.none() | st.sampled_from([n for n in ODD_INTEGERS if -high <= n <= high]) | st.integers(-high, high)


def _damage_bytes(draw, folder: Path) -> str:
    file = draw(st.sampled_from(_tables(folder)))
    data = file.read_bytes()
    kind = draw(st.sampled_from(("cut", "flip", "flip", "footer", "footer", "other", "text", "bomb", "words", "lists")))
    if kind == "cut":
        data = data[: draw(st.integers(0, len(data)))]
    elif kind == "flip":
        data = _flipped(draw, data)
    elif kind == "footer":
        start = max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
        data = data[:start] + _flipped(draw, data[start:])
    elif kind == "other":
        data = draw(st.sampled_from(_tables(folder))).read_bytes()
    elif kind == "text":
        data = draw(st.binary(max_size=200))
    else:
        return kind + " " + _bomb(draw, file, kind)
    file.write_bytes(data)
    return f"{file.parent.name}/{file.name} {kind}"


def _bomb(draw, file: Path, kind: str) -> str:
    """A small file of many rows, one long word in all of them, or lists of as many numbers."""
    table = _table_of(file)
    size = draw(st.sampled_from((10**5, 10**6, 5 * 10**6)))
    columns = {}
    for field in table.schema:
        plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_list(plain):
            columns[field.name] = pa.array([[1] * (size if kind == "lists" else 1)], type=plain)
        elif pa.types.is_string(plain):
            word = "x" * (size if kind == "words" else 1)
            columns[field.name] = pa.array(["decode" if field.name == "phase" else word])
        else:
            columns[field.name] = pa.array([1]).cast(plain)
    rows = pa.table(columns)
    if kind != "lists":
        rows = rows.take(pa.array([0] * min(size, 10**6) if kind == "bomb" else [0] * 20))
    pq.write_table(rows, file, compression="zstd", use_dictionary=True, store_schema=draw(st.booleans()))
    return f"{file.parent.name}/{file.name} of {size}"


def _flipped(draw, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 8))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


def _damage_folder(draw, folder: Path) -> str:
    """A file is missing, or is a link out of the folder, a pipe, a folder."""
    files = [path for path in (folder / "run.json", *_tables(folder)) if path.is_file()]
    if not files:
        return "nothing is left"
    file = draw(st.sampled_from(files))
    kind = draw(st.sampled_from(("missing", "link", "zero", "pipe", "folder", "links", "digits")))
    if kind == "links" and file.parent != folder:
        shutil.rmtree(file.parent)
        file.parent.symlink_to("/etc")
    elif kind == "digits" and file.parent != folder:
        file.rename(file.with_name("part-" + "9" * 200 + ".parquet"))
    else:
        file.unlink()
        if kind == "link":
            file.symlink_to("/etc/passwd")
        elif kind == "zero":
            file.symlink_to("/dev/zero")
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
    return f"{kind} {file.name[:40]}"


def _write(rows: pa.Table, file: Path) -> None:
    with contextlib.suppress(pa.ArrowException):  # what cannot be written cannot be sent either
        pq.write_table(rows, file)


# -- reading -----------------------------------------------------------------------------------


def arguments(command: str, folder: Path, out: Path) -> list[str]:
    """What to type for a command that reads the trace in the folder."""
    return {
        "show": ["show", str(folder)],
        "json": ["show", "--json", str(folder)],
        "csv": ["show", "--format", "csv", str(folder)],
        "markdown": ["show", "--format", "markdown", str(folder)],
        "report": ["report", str(folder), "-o", str(out / "report.html")],
        "explain": ["explain", str(folder), "--step", "1"],
        "compare": ["compare", str(folder), str(SAMPLE), "-o", str(out / "compare.html")],
        "export": ["export", str(folder), "-o", str(out / "perfetto.json")],
        "plan": ["plan", str(folder)],
    }[command]


def fault_of(command: str, folder: Path, out: Path) -> str | None:
    """Run a command; None when it ended in a result or in one sentence, else what went wrong."""
    printed, said = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            main(arguments(command, folder, out), prog_name="lifetrace", standalone_mode=False)
    except SystemExit as ended:
        if ended.code not in (0, 1, 2):
            return f"it exits with {ended.code!r}"
    except Exception:  # noqa: BLE001 - this is what is looked for
        return traceback.format_exc()
    error = said.getvalue()
    if UNEXPECTED in error:
        return error
    if "Traceback" in error or len(error.splitlines()) > 3:
        return f"it says {error[:2000]}"
    for text in (printed.getvalue(), error):
        if "\x1b" in text or "\x07" in text or "\u202e" in text:
            return f"it prints a control character: {text[:2000]!r}"
    return None
