"""Reads one Parquet file of a trace from anyone: its size is known before it is read, its values are looked at after.

Parquet stores a billion equal values in a few bytes. So what a table would take in memory is taken
from the headers of its pages first, and has to stand in some relation to what lies on the disk.
"""

import os
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lifetrace.errors import TraceError

from . import schema, upgrade
from .parquet_size import decoded_bytes

# A table may take so much memory whatever its files take, and so many times their size beyond it; what
# lifetrace writes takes up to 40 times.
ROOM_BYTES = 64 * 2**20
EXPANSION = 200
MAX_FOOTER_STRING_BYTES = 2**24
MAX_FOOTER_ITEMS = 2**18
MAX_ROW_GROUPS = 1024
MAX_COLUMNS = 128
MAX_RANKS = 64
LIMIT = 2**62
MAX_TEXT_BYTES = 2**20


def files_of(folder: Path, table: schema.Table) -> list[Path]:
    """The files of a table that lie in the folder itself, in order.

    Raises:
        TraceError: one is a link, or no file.
    """
    if table.in_parts:
        place = folder / table.name
        if place.is_symlink():
            raise TraceError(f"{place} is a link; lifetrace reads only what lies in the trace's own folder.")
        found = sorted(place.glob("part-*.parquet"))
    else:
        found = [path for path in [folder / f"{table.name}.parquet"] if os.path.lexists(path)]
    for path in found:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TraceError(f"{path} is a link or no file; lifetrace reads only what lies in the trace's own folder.")
    return found


def covers(file: Path) -> int:
    """How many consecutive parts a file stands for, itself included, by its own word; 1 where it is damaged."""
    try:
        metadata = pq.read_schema(file).metadata or {}
        return max(1, int(metadata.get(schema.COVERS, b"1")))
    except (OSError, ValueError, pa.ArrowException):
        return 1  # reported when its rows are read


def read_files(files: list[Path], table: schema.Table, version: int) -> list[pa.Table]:
    """Read the files of a table, one after another; together they keep to the bound on memory.

    Raises:
        TraceError: one is damaged, is no file of this table, or would take more memory than it may.
    """
    room = ROOM_BYTES
    parts = []
    for file in files:
        room += EXPANSION * file.stat().st_size
        rows = _read(file, table, version, room)
        room -= rows.nbytes
        parts.append(rows)
    return parts


def _read(file: Path, table: schema.Table, version: int, room: int) -> pa.Table:
    try:
        rows = _decoded(file, table, version, room)
        rows.validate(full=True)
        rows = upgrade.table(table.name, rows, version, file.parent)
        _check_columns(file, rows.schema, table)
        rows = rows.select(table.schema.names)
        if sum(map(_text_bytes, rows.columns)) > room:
            raise _TooLarge
        rows = rows.cast(table.schema)
    except _TooLarge:
        raise TraceError(
            f"{file} would take more than {room >> 20} MiB of memory for a file of {file.stat().st_size} bytes, "
            "which no file of lifetrace does. Move it away to read the rest of the trace."
        ) from None
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise TraceError(f"{file} cannot be read: {first_line}. Move it away to read the rest of the trace.") from None
    _check_values(file, rows, table)
    return rows


def _decoded(file: Path, table: schema.Table, version: int, room: int) -> pa.Table:
    """The columns as they are stored, but texts by dictionary: a word that is there a million times is held once."""
    limits = {
        "thrift_string_size_limit": MAX_FOOTER_STRING_BYTES,
        "thrift_container_size_limit": MAX_FOOTER_ITEMS,
    }
    if decoded_bytes(file) > room:
        raise _TooLarge
    with pq.ParquetFile(file, **limits) as stored:
        names = _columns(file, stored, table, version)
        texts = [name for name in names if _is_text(stored.schema_arrow.field(name).type)]
    with pq.ParquetFile(file, read_dictionary=texts, **limits) as stored:
        return stored.read(columns=names)


class _TooLarge(Exception):
    """A file would take more memory than it may."""


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_dictionary(type_)


def _columns(file: Path, stored: pq.ParquetFile, table: schema.Table, version: int) -> list[str]:
    """The columns to read: the table's own, or all that an older version had."""
    metadata = stored.metadata
    if metadata.num_row_groups > MAX_ROW_GROUPS or metadata.num_columns > MAX_COLUMNS:
        raise TraceError(f"{file} has more row groups or columns than any file of lifetrace.")
    found = stored.schema_arrow
    if version < schema.FORMAT_VERSION:
        return list(found.names)
    _check_columns(file, found, table)
    return list(table.schema.names)


def _check_columns(file: Path, found: pa.Schema, table: schema.Table) -> None:
    """Raise TraceError where a column is missing, is there twice, or is of another kind than the table's."""
    for field in table.schema:
        count = len(found.get_all_field_indices(field.name))
        if count != 1:
            lacks = "lacks the column" if not count else "has more than once the column"
            raise TraceError(f"{file} {lacks} {field.name}; it is no {table.name} table of this format.")
        stored = found.field(field.name).type
        if _kind(stored) != _kind(field.type):
            raise TraceError(f"{file} is damaged: its column {field.name} holds {stored}, not {field.type}.")


def _kind(type_: pa.DataType) -> str:
    """What a column holds, whatever width and encoding it has."""
    if pa.types.is_dictionary(type_):
        return _kind(type_.value_type)
    if pa.types.is_list(type_) and not pa.types.is_nested(type_.value_type):
        return f"list of {_kind(type_.value_type)}"
    kinds = {
        "text": pa.types.is_string(type_) or pa.types.is_large_string(type_),
        "integer": pa.types.is_integer(type_),
        "number": pa.types.is_floating(type_),
    }
    return next((name for name, fits in kinds.items() if fits), str(type_))


def _text_bytes(column: pa.ChunkedArray) -> int:
    """What a dictionary-encoded column takes as plain text."""
    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            lengths = pc.binary_length(chunk.dictionary)
            total += pc.sum(pc.take(lengths, chunk.indices.drop_null()).cast(pa.int64())).as_py() or 0
    return total


def _check_values(file: Path, rows: pa.Table, table: schema.Table) -> None:
    """Raise TraceError for values that no run has: what readers add up, index and draw by."""
    for column in table.columns:
        if column.name in schema.REQUIRED[table.name] and rows[column.name].null_count:
            raise TraceError(f"{file} is damaged: its column {column.name} has an empty row.")
        values = rows[column.name]
        if pa.types.is_list(column.type):
            values = pc.list_flatten(values)
        low = -LIMIT if column.name.endswith("_ns") else int(column.name == "batch")
        if pa.types.is_integer(values.type):
            _check_range(file, column.name, pc.min_max(values).as_py(), low)
        elif pa.types.is_dictionary(values.type) or pa.types.is_string(values.type):
            _check_text(file, column.name, values)
    phases = {"steps": schema.PHASES}.get(table.name)
    if phases and not set(rows["phase"].unique().to_pylist()) <= set(phases):
        raise TraceError(f"{file} is damaged: a phase is none of {', '.join(phases)}.")


def _check_range(file: Path, name: str, found: dict[str, int | None], low: int) -> None:
    for value in found.values():
        if value is not None and not low <= value <= LIMIT:
            raise TraceError(f"{file} is damaged: {name} is {value}, which no run has.")


def _check_text(file: Path, name: str, values: pa.ChunkedArray) -> None:
    """Raise TraceError for a text longer than any name or token."""
    for chunk in values.chunks:
        words = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
        if (pc.max(pc.binary_length(words)).as_py() or 0) > MAX_TEXT_BYTES:
            raise TraceError(f"{file} is damaged: a text in {name} is longer than {MAX_TEXT_BYTES} bytes.")


def check_whole(folder: Path, rows: pa.Table, table: schema.Table) -> None:
    """Raise TraceError where rows that have to be told apart are not: tables are joined by these columns."""
    key = schema.UNIQUE.get(table.name)
    if key is None:
        return
    if pc.count_distinct(rows["rank"]).as_py() > MAX_RANKS:
        raise TraceError(f"{folder / table.name} is damaged: it has rows of more than {MAX_RANKS} ranks.")
    if len(rows.select(["rank", key]).group_by(["rank", key]).aggregate([])) != len(rows):
        raise TraceError(f"{folder / table.name} is damaged: two of its rows have the same {key}.")
