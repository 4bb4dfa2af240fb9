"""Reads a trace folder. Nothing here runs anything that a trace holds: JSON and Parquet only."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from lifetrace.errors import TraceError

from . import schema, table_file
from .gaps import part_gap, status_gap
from .manifest import MANIFEST, RANK_FOLDERS, read_manifest

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

MAX_DEPTH = 3  # of a trace in a folder of runs: a home folder is not searched through
MAX_DIGITS = 18  # of a part's number

T = TypeVar("T")


class Trace:
    """A stored trace. Tables are loaded when they are first asked for.

    Attributes:
        path: the folder.
        meta: the manifest, as `run.json` holds it.
        steps, spans, kv, tokens, modules, products: pandas DataFrames with Arrow types, so that
            integers stay integers and a missing value is missing. Of a trace of several processes they hold
            the rows of all, told apart by `rank`; `table` and all that stands on it are of the first.
        ranks: the partitions of a trace of several processes, this one first.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._version: int = meta.get("written_version", schema.FORMAT_VERSION)
        self._files: dict[str, table_file.TableFiles] = {}
        self._columns: dict[str, dict[str, pa.ChunkedArray]] = {}
        self._found: dict[str, Any] = {}

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a table as Arrow, without pandas; empty where the trace has none.

        Args:
            name: of the table.
            columns: to read, in this order; all where none are named. A column is read once and kept.

        Raises:
            TraceError: when a file of it cannot be read, or lacks a column.
        """
        table = schema.TABLES[name]
        names = table.schema.names if columns is None else list(columns)
        kept = self._columns.setdefault(name, {})
        missing = [column for column in names if column not in kept]
        if missing:
            parts = self._files_of(name).read(missing)
            rows = pa.concat_tables(parts).unify_dictionaries() if parts else table.schema.empty_table()
            kept |= {column: rows[column] for column in missing}
        return pa.table({column: kept[column] for column in names})

    def scan(self, name: str, columns: Sequence[str], work: Callable[[pa.Table], T]) -> list[T]:
        """Give some columns of a table to `work`, the rows of one file after the other, and keep none of them.

        What `work` returns is all that stays in memory: so a table of any length is added up. It runs in several
        threads at once.

        Raises:
            TraceError: when a file of it cannot be read, or lacks a column.
        """
        return self._files_of(name).scan(list(columns), work)

    def once(self, name: str, find: Callable[[], T]) -> T:
        """What `find` returns, which is called the first time alone; for what several analyses stand on."""
        if name not in self._found:
            self._found[name] = find()
        found: T = self._found[name]
        return found

    def has_found(self, name: str) -> bool:
        """Whether `once` was asked for this already."""
        return name in self._found

    def _files_of(self, name: str) -> table_file.TableFiles:
        if name not in self._files:
            table = schema.TABLES[name]
            files = table_file.files_of(self.path, table)
            if table.in_parts:
                files = _uncovered(files)
            size = table_file.disk_bytes(self.path)
            self._files[name] = table_file.TableFiles(files, table, self._version, size)
        return self._files[name]

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """One row a forward of the model."""
        return self._frame("steps")

    @cached_property
    def spans(self) -> "pd.DataFrame":
        """One row a stage or module call."""
        return self._frame("spans")

    @cached_property
    def kv(self) -> "pd.DataFrame":
        """One row a cache layer a step."""
        return self._frame("kv")

    @cached_property
    def tokens(self) -> "pd.DataFrame":
        """One row a token a sequence."""
        return self._frame("tokens")

    @cached_property
    def modules(self) -> "pd.DataFrame":
        """One row a module with parameters of its own."""
        return self._frame("modules")

    @cached_property
    def products(self) -> "pd.DataFrame":
        """One row a matrix product of each distinct step."""
        return self._frame("products")

    @cached_property
    def ops(self) -> "pd.DataFrame":
        """One row an operator of a place in a profiled step; empty unless the run was told `--ops`."""
        return self._frame("ops")

    @cached_property
    def gaps(self) -> list[str]:
        """What is missing, in sentences: of a run that goes on still or was killed, of a file that was lost."""
        found = [status_gap(self.path, self.meta.get("status"))]
        found += [_part_gap(self.path, table) for table in schema.TABLES.values() if table.in_parts]
        others = [f"rank {one.rank}: {gap}" for one in self.ranks[1:] for gap in one.gaps]
        return [gap for gap in found if gap is not None] + others + self._lost_ranks()

    @property
    def rank(self) -> int:
        """Which process of a job wrote this partition."""
        return int(self.meta.get("rank") or 0)

    @cached_property
    def ranks(self) -> "list[Trace]":
        """The partitions of all processes of the job that left one, this one first.

        Raises:
            TraceError: one of them cannot be read.
        """
        if self.rank:
            return [self]
        folders = [folder for folder in self.path.glob(RANK_FOLDERS) if (folder / MANIFEST).is_file()]
        if any(folder.is_symlink() for folder in folders) or len(folders) > table_file.MAX_RANKS:
            raise TraceError(f"{self.path} is damaged: its ranks are links, or more than {table_file.MAX_RANKS}.")
        others = (read_trace(folder) for folder in folders)
        mine = [one for one in others if self._is_beside(one)]
        return sorted([self, *mine], key=lambda trace: trace.rank)

    def _is_beside(self, other: "Trace") -> bool:
        """Whether another partition is of the same job."""
        in_job = 0 < other.rank < (self.meta.get("world_size") or 1)
        return in_job and other.meta.get("job") == self.meta.get("job")

    def _lost_ranks(self) -> list[str]:
        expected = 0 if self.rank else min(int(self.meta.get("world_size") or 1), table_file.MAX_RANKS)
        lost = set(range(expected)) - {one.rank for one in self.ranks}
        return [f"rank {rank} left no trace: it was not traced, or ended before" for rank in sorted(lost)]

    def _frame(self, name: str) -> "pd.DataFrame":
        """A table of all processes."""
        return _frame(pa.concat_tables([one.table(name) for one in self.ranks]).unify_dictionaries())

    def timeline(self) -> "go.Figure":
        """Draw each step as a bar of the stages that took its time."""
        return self._figure("timeline")

    def breakdown(self) -> "go.Figure":
        """Draw the share of prefill and of decode that each stage and part took."""
        return self._figure("breakdown")

    def roofline(self) -> "go.Figure":
        """Draw the stages as points under the device's ceilings: FLOP/s over FLOP a byte."""
        return self._figure("roofline")

    def heatmap(self, by: str = "time") -> "go.Figure":
        """Draw every layer in every step, by its `time` or by its `efficiency`: roof ÷ measured.

        Raises:
            ValueError: `by` is something else.
        """
        if by not in ("time", "efficiency"):
            raise ValueError(f"by={by!r} is no colour of the heat map; it takes 'time' or 'efficiency'.")
        return self._figure("heatmap" if by == "time" else "efficiency")

    def kv_growth(self) -> "go.Figure":
        """Draw the bytes of the KV cache after each step beside what the model's config says."""
        return self._figure("kv-growth")

    def memory(self) -> "go.Figure":
        """Draw what weights and cache need after each step, and the memory measured around them."""
        return self._figure("memory")

    def token_latency(self) -> "go.Figure":
        """Draw the time between consecutive tokens of each call."""
        return self._figure("token-latency")

    def _figure(self, name: str) -> "go.Figure":
        from .gallery import FIGURES  # plotly is loaded when a figure is asked for, not with the trace

        return FIGURES[name](self)

    def __repr__(self) -> str:
        model = (self.meta.get("model") or {}).get("id")
        return f"<Trace {self.path} of {model}, {self.meta.get('status')}, {len(self.table('steps'))} steps>"

    def _repr_html_(self) -> str:
        from .notebook import notebook_html  # it stands on this module

        return notebook_html(self)


def read_trace(path: str | Path) -> Trace:
    """Open a trace folder.

    Args:
        path: the folder, or its `run.json`.

    Raises:
        TraceError: when it is no trace, is damaged, or was written by a newer lifetrace.
    """
    folder = Path(path)
    if folder.name == MANIFEST:
        folder = folder.parent
    return Trace(folder, read_manifest(folder))


def trace_folders(path: str | Path) -> list[Path]:
    """The traces in a folder of runs, itself if it is one, by name; also in folders below it, as of model and date."""
    folder = Path(path)
    if (folder / MANIFEST).is_file() or folder.name == MANIFEST:
        return [folder]
    levels = ("*/" * depth for depth in range(1, MAX_DEPTH + 1))
    found = (manifest.parent for level in levels for manifest in folder.glob(level + MANIFEST))
    return sorted(one for one in found if not (one.parent / MANIFEST).is_file())  # it would be a rank's partition


def read_traces(path: str | Path) -> list[Trace]:
    """Open a trace, or all traces in a folder of runs.

    Raises:
        TraceError: there is none, or one of them cannot be read.
    """
    folders = trace_folders(path)
    return [read_trace(folder) for folder in folders] if folders else [read_trace(path)]


def _uncovered(files: list[Path]) -> list[Path]:
    """Leave out parts that an earlier one stands for: they outlive it when a run is killed while it closes."""
    chosen, covered = [], -1
    for file in files:
        number = part_number(file)
        if number > covered:
            chosen.append(file)
            covered = number + table_file.covers(file) - 1
    return chosen


def _part_gap(folder: Path, table: schema.Table) -> str | None:
    files = _uncovered(table_file.files_of(folder, table))
    return part_gap(table.name, [(part_number(file), table_file.covers(file)) for file in files])


def part_number(file: Path) -> int:
    """The number in the name of a part file."""
    return int("".join(c for c in file.stem if c in "0123456789")[:MAX_DIGITS] or 0)


def _frame(rows: pa.Table) -> "pd.DataFrame":
    import pandas as pd

    plain = pa.schema(
        [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in rows.schema]
    )
    frame: pd.DataFrame = rows.cast(plain).to_pandas(types_mapper=pd.ArrowDtype)
    return frame
