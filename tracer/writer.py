"""Writes a trace folder: the manifest, part files, whole tables; each under its name only when whole."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lifetrace.analysis import schema
from lifetrace.analysis.gaps import CLAIM, is_claimed
from lifetrace.analysis.manifest import RANK_FOLDERS
from lifetrace.errors import RunError, TraceError

from .claim import Claim

MANIFEST = "run.json"
COVERS = schema.COVERS
# Parts are written while the program waits, and rewritten at the end, when nothing waits: then harder than by default.
PASSING = {"compression": "lz4", "write_statistics": False}
LASTING = {"compression": "zstd", "compression_level": 12}
# Durations are no steps of a sequence: plain they compress better than as differences. Split by byte they would
# do so still better, but DuckDB reads that of whole numbers only since its version 2.
DURATIONS = ("host_ns", "device_ns")
MAX_ROWS_PER_PART = 250_000
# What a process that was killed leaves of the files that it was writing.
UNFINISHED = (".run.json.*.tmp", ".report.html.*.tmp", ".*.parquet.*.tmp", "*/.part-*.parquet.*.tmp")


def prepare_folder(path: Path, force: bool) -> None:
    """Make the folder of a new trace; an older trace in it is removed only when forced.

    Raises:
        TraceError: when it cannot be written, holds something, or another run is writing into it.
    """
    claim_folder(path, force).release()


def claim_folder(path: Path, force: bool) -> Claim:
    """Prepare the folder of a new trace and keep other writers from it, until the claim is released."""
    try:
        if path.exists() and not path.is_dir():
            raise TraceError(f"{path} is a file; give --out the name of a folder.")
        path.mkdir(parents=True, exist_ok=True)
        claim = Claim(path)
        try:
            _empty(path, force)
        except BaseException:
            claim.release()
            raise
        return claim
    except OSError as error:
        raise TraceError(f"The folder {path} cannot be written: {error.strerror}. Choose another with --out.") from None


def _empty(path: Path, force: bool) -> None:
    if any(file.name != CLAIM and not _is_of_another_rank(file) for file in path.iterdir()):
        if not force:
            raise TraceError(f"The folder {path} is not empty; choose another with --out, or add --force.")
        remove_trace(path)


def _is_of_another_rank(file: Path) -> bool:
    """Whether a process of the same job has begun to write there, or is about to."""
    return file.match(RANK_FOLDERS) and file.is_dir() and (is_claimed(file) or not (file / MANIFEST).exists())


def remove_trace(path: Path) -> None:
    """Remove the files of a trace and nothing else, also of one that was killed; other things are refused."""
    unfinished = [file for pattern in UNFINISHED for file in path.glob(pattern)]
    ranks = list(path.glob(RANK_FOLDERS))
    if not (path / MANIFEST).exists() and set(path.iterdir()) - {*unfinished, *ranks, path / CLAIM}:
        raise TraceError(f"The folder {path} holds something that is no trace; lifetrace does not delete that.")
    for folder in ranks:
        if not _is_of_another_rank(folder):
            remove_trace(folder)
            folder.rmdir()
    for file in unfinished:
        file.unlink()
    for table in schema.TABLES.values():
        for file in path.glob(f"{table.name}/part-*.parquet"):
            file.unlink()
        if (path / table.name).is_dir():
            (path / table.name).rmdir()
        (path / f"{table.name}.parquet").unlink(missing_ok=True)
    (path / "report.html").unlink(missing_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)


class TraceWriter:
    """Writes into one trace folder. Every method raises RunError when the disk does not take it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._rows: dict[str, list[int]] = {}

    def manifest(self, manifest: dict[str, Any]) -> None:
        """Write or replace the manifest."""
        text = json.dumps(manifest, indent=1, ensure_ascii=True, allow_nan=False)

        def write(name: str) -> None:
            Path(name).write_text(text, encoding="ascii")

        self._put(self.path / MANIFEST, write)

    def warm_up(self) -> None:
        """Convert and encode a row into memory, so that the first part in a timed run pays for no import."""
        for table in (schema.STEPS, schema.SPANS, schema.KV):
            pq.write_table(table.schema.empty_table(), pa.BufferOutputStream(), **PASSING, **_encoding(table))
        pa.array(np.zeros(1, dtype=np.int64)).dictionary_encode()

    def part(self, name: str, rows: pa.Table) -> None:
        """Add a part file to a table; a part without rows is not written."""
        if not len(rows):
            return
        written = self._rows.setdefault(name, [])
        self._put_table(self._part_path(name, len(written)), rows, schema.TABLES[name], PASSING)
        written.append(len(rows))

    def table(self, name: str, rows: pa.Table) -> None:
        """Write or replace a table that is one file."""
        self._put_table(self.path / f"{name}.parquet", rows, schema.TABLES[name])

    def complete(self, name: str, fill: Callable[[pa.Table], pa.Table]) -> None:
        """Rewrite a table's parts with what `fill` makes of them, several small parts as one.

        The new file takes the name of the first and says how many it covers, so that a reader
        who comes between the renaming and the removal of the others takes no row twice.
        """
        for first, last in _batches(self._rows.get(name, [])):
            paths = [self._part_path(name, number) for number in range(first, last)]
            rows = pa.concat_tables([self._read(path, schema.TABLES[name]) for path in paths])
            covering = fill(rows.unify_dictionaries()).replace_schema_metadata({COVERS: str(last - first)})
            self._put_table(paths[0], covering, schema.TABLES[name])
            for path in paths[1:]:
                path.unlink()

    def _read(self, path: Path, table: schema.Table) -> pa.Table:
        return pq.read_table(path, schema=table.schema, partitioning=None)

    def _part_path(self, name: str, number: int) -> Path:
        return self.path / name / f"part-{number:05d}.parquet"

    def _put_table(self, path: Path, rows: pa.Table, table: schema.Table, form: dict[str, Any] = LASTING) -> None:
        def write(name: str) -> None:
            pq.write_table(rows, name, **form, **_encoding(table))

        self._put(path, write)

    def _put(self, path: Path, write: Callable[[str], None]) -> None:
        """Write under a temporary name, then rename: a broken file never has the final name."""
        if os.getpid() != self._pid:
            raise RunError(f"The trace in {self.path} is written by the process that began it; this is a fork of it.")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            write(str(temporary))
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            cause = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
            raise RunError(
                f"The trace in {self.path} could not be written further: {cause}. What it holds so far can be read."
            ) from error


@cache
def _encoding(table: schema.Table) -> dict[str, Any]:
    """How a table is encoded: differences keep times and ids at two or three bytes; words and shapes repeat."""
    numbers = [c.name for c in table.columns if pa.types.is_integer(c.type)]
    words = [c.name for c in table.columns if pa.types.is_dictionary(c.type)]
    lists = [f"{c.name}.list.element" for c in table.columns if pa.types.is_list(c.type)]
    plain = {name: "PLAIN" for name in numbers if name in DURATIONS}
    return {
        "use_dictionary": words + lists,
        "column_encoding": dict.fromkeys(numbers, "DELTA_BINARY_PACKED") | plain,
    }


def _batches(row_counts: list[int]) -> Iterator[tuple[int, int]]:
    """Group consecutive parts, first and last (excluded), into batches of so many rows at most."""
    first, total = 0, 0
    for number, rows in enumerate(row_counts):
        if number > first and total + rows > MAX_ROWS_PER_PART:
            yield first, number
            first, total = number, 0
        total += rows
    if row_counts:
        yield first, len(row_counts)
