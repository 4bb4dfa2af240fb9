"""Reads one Parquet file of a trace from anyone: its size is known before it is read, its values are looked at after.

Parquet stores a billion equal values in a few bytes. So what a table would take in memory is taken
from the headers of its pages first, and has to stand in some relation to what lies on the disk.
"""

import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lifetrace.errors import TraceError

from . import schema, upgrade
from .parquet_size import decoded_bytes

# A table may take so much memory whatever the trace takes on the disk, and so many times that beyond it. What lifetrace
# writes takes up to 50 times as a whole; its table of a cache that grows evenly over 600 times, since lines compress.
ROOM_BYTES = 64 * 2**20
EXPANSION = 200
MAX_FOOTER_STRING_BYTES = 2**24
MAX_FOOTER_ITEMS = 2**18
MAX_ROW_GROUPS = 1024
MAX_COLUMNS = 128
MAX_DIMENSIONS = 64  # torch's own bound
MAX_RANKS = 64
LIMIT = 2**62
MAX_TEXT_BYTES = 2**20
MAX_THREADS = 4  # each holds the columns of a file, or of small ones of so many bytes in all
BATCH_BYTES = 2**20

A = TypeVar("A")
T = TypeVar("T")
KeyRange = tuple[int, int, int]


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


def disk_bytes(folder: Path) -> int:
    """The size of all tables of a trace, links and the like left out."""
    paths = (path for table in schema.TABLES for path in (*folder.glob(f"{table}/part-*"), folder / f"{table}.parquet"))
    found = (path.lstat() for path in paths if os.path.lexists(path))
    return sum(facts.st_size for facts in found if stat.S_ISREG(facts.st_mode))


def covers(file: Path) -> int:
    """How many consecutive parts a file stands for, itself included, by its own word; 1 where it is damaged."""
    try:
        metadata = pq.read_schema(file).metadata or {}
        return max(1, int(metadata.get(schema.COVERS, b"1")))
    except (OSError, ValueError, pa.ArrowException):
        return 1  # reported when its rows are read


class TableFiles:
    """The files of one table of a trace, of which columns are read as they are needed.

    All that is kept of them together keeps to the bound on memory; so does each file while it is scanned.
    """

    def __init__(self, files: list[Path], table: schema.Table, version: int, disk_bytes: int) -> None:
        """`disk_bytes` is the size of the whole trace."""
        self.files = files
        self.table = table
        self._version = version
        self._states = [_state(file) for file in files]
        self._sizes = [state[1] for state in self._states]
        self._room = ROOM_BYTES + EXPANSION * disk_bytes
        self._is_checked = False

    def read(self, columns: list[str]) -> list[pa.Table]:
        """Read columns of all files, a table a file.

        Raises:
            TraceError: a file is damaged, is none of this table, has changed since it was first looked at, or would
                take more memory than it may.
        """
        key = self._unchecked_key()
        rows = self._read(_with_keys(columns, key))
        if key is not None:
            self._check_keys([_key_range(part, key) for part in rows])
        return [part.select(columns) for part in rows]

    def scan(self, columns: list[str], work: Callable[[pa.Table], T]) -> list[T]:
        """Give the rows of each file to `work`, several files at once, and keep nothing but what it returns.

        Small files, as a run that was killed leaves them by the thousand, are given together.

        Raises:
            TraceError: as `read` does.
        """
        key = self._unchecked_key()
        wanted = _with_keys(columns, key)

        def one(numbers: Sequence[int]) -> tuple[list[KeyRange | None], T]:
            room = ROOM_BYTES + EXPANSION * sum(self._sizes[number] for number in numbers)
            parts = self._decoded(numbers, wanted, room)
            rows = pa.concat_tables(parts).unify_dictionaries().select(columns)
            return [_key_range(part, key) for part in parts] if key else [], work(rows)

        found = self._each(one, self._batches())
        if key is not None:
            self._check_keys([keys for ranges, _ in found for keys in ranges])
        return [result for _, result in found]

    def _read(self, columns: list[str]) -> list[pa.Table]:
        for number, file in enumerate(self.files):
            decoded = self._decoded_bytes(number, columns)
            if decoded > self._room:
                raise _too_large(file, self._room)
            self._room -= decoded
        room = self._room
        return self._each(lambda number: self._file(number, columns, room), range(len(self.files)))

    def _decoded(self, numbers: Sequence[int], columns: list[str], room: int) -> list[pa.Table]:
        """Some files, one after the other, which together keep to a bound of their own."""
        left = room
        for number in numbers:
            left -= self._decoded_bytes(number, columns)
            if left < 0:
                raise _too_large(self.files[number], room)
        return [self._file(number, columns, room) for number in numbers]

    def _each(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        if len(items) < 2:  # most traces: a thread takes longer to begin than they to be read
            return list(map(work, items))
        with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1, MAX_THREADS)) as pool:
            return list(pool.map(work, items))

    def _batches(self) -> list[list[int]]:
        """Consecutive files that are read together: one, or several small ones."""
        found: list[list[int]] = []
        size = 0
        for number, more in enumerate(self._sizes):
            if not found or size + more > BATCH_BYTES:
                found.append([])
                size = 0
            found[-1].append(number)
            size += more
        return found

    def _decoded_bytes(self, number: int, columns: list[str]) -> int:
        file = self.files[number]
        try:
            # an older version had other columns, all of which its upgrade may need
            return decoded_bytes(file, columns if self._version == schema.FORMAT_VERSION else None)
        except (OSError, ValueError) as error:
            raise _unreadable(file, error) from None

    def _file(self, number: int, columns: list[str], room: int) -> pa.Table:
        file = self.files[number]
        if _state(file) != self._states[number]:
            raise TraceError(f"{file} was rewritten while the trace was read: its run has just ended. Read it again.")
        return _read(file, self.table, columns, self._version, room)

    def _unchecked_key(self) -> str | None:
        """The column that is still to be looked at, which every first reading does beside its own."""
        return None if self._is_checked else schema.UNIQUE.get(self.table.name)

    def _check_keys(self, ranges: Sequence[KeyRange | None]) -> None:
        """Raise TraceError where rows that have to be told apart are not: tables are joined by these columns."""
        if not _are_apart(ranges):
            key = schema.UNIQUE[self.table.name]
            _check_unique(self.files[0].parent, key, pa.concat_tables(self._read(["rank", key])))
        self._is_checked = True


def _with_keys(columns: list[str], key: str | None) -> list[str]:
    return list(dict.fromkeys([*columns, *(["rank", key] if key else [])]))


def _state(file: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced: its number on the disk, its size, its time."""
    try:
        found = file.stat(follow_symlinks=False)
    except OSError as error:
        raise _unreadable(file, error) from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(file: Path, table: schema.Table, columns: list[str], version: int, room: int) -> pa.Table:
    try:
        rows = _decoded(file, table, columns, version)
        rows.validate(full=True)
        if version < schema.FORMAT_VERSION:
            rows = upgrade.table(table.name, rows, version, file.parent)
            _check_columns(file, rows.schema, table)
            rows = rows.select(columns)
        if sum(_text_bytes(column, room) for column in rows.columns) > room:
            raise _too_large(file, room)
        rows = rows.cast(pa.schema([table.schema.field(name) for name in columns]))
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise _unreadable(file, error) from None
    _check_values(file, rows, table)
    return rows


def _decoded(file: Path, table: schema.Table, columns: list[str], version: int) -> pa.Table:
    """The columns as they are stored, but texts by dictionary: a word that is there a million times is held once."""
    limits = {
        "thrift_string_size_limit": MAX_FOOTER_STRING_BYTES,
        "thrift_container_size_limit": MAX_FOOTER_ITEMS,
    }
    with pq.ParquetFile(file, **limits) as stored:
        _check_shape(file, stored.metadata)
        found = stored.schema_arrow
        if version == schema.FORMAT_VERSION:
            _check_columns(file, found, table)
        names = columns if version == schema.FORMAT_VERSION else list(found.names)
        texts = [name for name in names if _is_plain_text(found.field(name).type)]
        if not texts:
            return stored.read(columns=names, use_threads=False)
    with pq.ParquetFile(file, read_dictionary=texts, **limits) as stored:
        return stored.read(columns=names, use_threads=False)


def _too_large(file: Path, room: int) -> TraceError:
    return TraceError(
        f"{file} would take more than {room >> 20} MiB of memory for a file of {file.stat().st_size} bytes, "
        "which no file of lifetrace does. Move it away to read the rest of the trace."
    )


def _unreadable(file: Path, error: Exception) -> TraceError:
    first_line = str(error).partition("\n")[0]
    return TraceError(f"{file} cannot be read: {first_line}. Move it away to read the rest of the trace.")


def _is_plain_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _check_shape(file: Path, metadata: pq.FileMetaData) -> None:
    if metadata.num_row_groups > MAX_ROW_GROUPS or metadata.num_columns > MAX_COLUMNS:
        raise TraceError(f"{file} has more row groups or columns than any file of lifetrace.")


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


def _text_bytes(column: pa.ChunkedArray, room: int) -> int:
    """What a dictionary-encoded column takes as plain text, exactly where it could be more than there is room for."""
    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            lengths = pc.binary_length(chunk.dictionary)
            most = (pc.max(lengths).as_py() or 0) * len(chunk)
            if most <= room // MAX_COLUMNS:
                total += most
            else:
                total += pc.sum(pc.take(lengths, chunk.indices.drop_null()).cast(pa.int64())).as_py() or 0
    return total


def _check_values(file: Path, rows: pa.Table, table: schema.Table) -> None:
    """Raise TraceError for values that no run has: what readers add up, index and draw by."""
    for column in (column for column in table.columns if column.name in rows.column_names):
        if column.name in schema.REQUIRED[table.name] and rows[column.name].null_count:
            raise TraceError(f"{file} is damaged: its column {column.name} has an empty row.")
        values = rows[column.name]
        if pa.types.is_list(column.type):
            if column.name.endswith("_shape") and (pc.max(pc.list_value_length(values)).as_py() or 0) > MAX_DIMENSIONS:
                raise TraceError(f"{file} is damaged: {column.name} has more dimensions than any tensor.")
            values = pc.list_flatten(values)
        low = -LIMIT if column.name.endswith("_ns") else int(column.name == "batch")
        if pa.types.is_integer(values.type):
            _check_range(file, column.name, pc.min_max(values).as_py(), low)
        elif pa.types.is_dictionary(values.type) or pa.types.is_string(values.type):
            _check_text(file, column.name, values)
    phases = {"steps": schema.PHASES}.get(table.name)
    if phases and "phase" in rows.column_names and not set(rows["phase"].unique().to_pylist()) <= set(phases):
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


def _key_range(rows: pa.Table, key: str) -> KeyRange | None:
    """The one rank of a file with its lowest and highest key, where all of its keys differ."""
    if not len(rows):
        return None
    ranks, keys = pc.min_max(rows["rank"].fill_null(-1)).as_py(), np.sort(rows[key].to_numpy(), kind="stable")
    if ranks["min"] != ranks["max"] or not (np.diff(keys) > 0).all():
        return None
    return ranks["min"], int(keys[0]), int(keys[-1])


def _are_apart(ranges: Sequence[KeyRange | None]) -> bool:
    """Whether no key can be in two files: those that one writer wrote follow each other."""
    known = sorted(found for found in ranges if found is not None)
    return (
        len(known) == len(ranges)
        and len({rank for rank, *_ in known}) <= MAX_RANKS
        and all(rank != next_rank or high < low for (rank, _, high), (next_rank, low, _) in pairwise(known))
    )


def _check_unique(place: Path, key: str, rows: pa.Table) -> None:
    """Raise TraceError where two rows of one rank have the same key, or there are too many ranks."""
    ranks, keys = rows["rank"].fill_null(-1).to_numpy(), rows[key].to_numpy()
    distinct = np.unique(ranks[:1]) if len(ranks) and (ranks == ranks[0]).all() else np.unique(ranks)
    if len(distinct) > MAX_RANKS:
        raise TraceError(f"{place} is damaged: it has rows of more than {MAX_RANKS} ranks.")
    for rank in distinct:
        mine = keys if len(distinct) == 1 else keys[ranks == rank]
        # nearly in order as they are, they take the stable sort one pass
        if not (np.diff(np.sort(mine, kind="stable")) > 0).all():
            raise TraceError(f"{place} is damaged: two of its rows have the same {key}.")
