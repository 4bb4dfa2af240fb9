"""Reads a trace folder. Nothing here runs anything that a trace holds: JSON and Parquet only."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lifetrace.errors import TraceError

from . import schema

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

MANIFEST = "run.json"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024


class Trace:
    """A stored trace. Tables are loaded when they are first asked for.

    Attributes:
        path: the folder.
        meta: the manifest, as `run.json` holds it.
        steps, spans, kv, tokens, modules, products: pandas DataFrames with Arrow types, so that
            integers stay integers and a missing value is missing.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """Return a table as Arrow, without pandas; empty where the trace has none.

        Raises:
            TraceError: when a file of it cannot be read, or lacks a column.
        """
        if name not in self._tables:
            self._tables[name] = _read_table(self.path, schema.TABLES[name])
        return self._tables[name]

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """One row a forward of the model."""
        return _frame(self.table("steps"))

    @cached_property
    def spans(self) -> "pd.DataFrame":
        """One row a stage or module call."""
        return _frame(self.table("spans"))

    @cached_property
    def kv(self) -> "pd.DataFrame":
        """One row a cache layer a step."""
        return _frame(self.table("kv"))

    @cached_property
    def tokens(self) -> "pd.DataFrame":
        """One row a token a sequence."""
        return _frame(self.table("tokens"))

    @cached_property
    def modules(self) -> "pd.DataFrame":
        """One row a module with parameters of its own."""
        return _frame(self.table("modules"))

    @cached_property
    def products(self) -> "pd.DataFrame":
        """One row a matrix product of each distinct step."""
        return _frame(self.table("products"))

    @cached_property
    def ops(self) -> "pd.DataFrame":
        """One row an operator of a place in a profiled step; empty unless the run was told `--ops`."""
        return _frame(self.table("ops"))

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
    return Trace(folder, _read_manifest(folder))


def trace_folders(path: str | Path) -> list[Path]:
    """The traces in a folder of runs, itself if it is one, by name."""
    folder = Path(path)
    if (folder / MANIFEST).is_file() or folder.name == MANIFEST:
        return [folder]
    return sorted(manifest.parent for manifest in folder.glob(f"*/{MANIFEST}"))


def read_traces(path: str | Path) -> list[Trace]:
    """Open a trace, or all traces in a folder of runs.

    Raises:
        TraceError: there is none, or one of them cannot be read.
    """
    folders = trace_folders(path)
    return [read_trace(folder) for folder in folders] if folders else [read_trace(path)]


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not folder.is_dir():
        raise TraceError(f"There is no folder {folder}; give the path of a trace.")
    if not file.is_file():
        raise TraceError(f"{folder} is no trace: it holds no {MANIFEST}. Give the folder that `lifetrace run` wrote.")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise TraceError(f"{file} is larger than {MAX_MANIFEST_BYTES} bytes; a manifest of lifetrace never is.")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{file} cannot be read as JSON: {error}. The trace's Parquet files may still be whole."
        ) from None
    if not isinstance(meta, dict) or not isinstance(meta.get("format_version"), int):
        raise TraceError(f"{file} is no manifest of lifetrace: it has no format_version.")
    for key, type_ in schema.MANIFEST_TYPES.items():
        if meta.get(key) is not None and not isinstance(meta[key], type_):
            raise TraceError(f"{file} is damaged: {key} is a {type(meta[key]).__name__}, not a {type_.__name__}.")
    if any(not isinstance(call, dict) for call in meta.get("calls") or []):
        raise TraceError(f"{file} is damaged: its calls are no objects.")
    if meta["format_version"] > schema.FORMAT_VERSION:
        raise TraceError(
            f"{folder} was written in format {meta['format_version']}, this lifetrace reads up to "
            f"{schema.FORMAT_VERSION}. Update lifetrace to read it."
        )
    return meta


def _read_table(folder: Path, table: schema.Table) -> pa.Table:
    if table.in_parts:
        files = _uncovered(sorted((folder / table.name).glob("part-*.parquet")))
    else:
        files = [file for file in [folder / f"{table.name}.parquet"] if file.is_file()]
    parts = [_read_file(file, table) for file in files]
    if not parts:
        return table.schema.empty_table()
    whole: pa.Table = pa.concat_tables(parts)
    return whole.unify_dictionaries()


def _uncovered(files: list[Path]) -> list[Path]:
    """Leave out parts that an earlier one stands for: they outlive it when a run is killed while it closes."""
    chosen, covered = [], -1
    for file in files:
        number = int("".join(c for c in file.stem if c.isdigit()) or 0)
        if number > covered:
            chosen.append(file)
            covered = number + _covers(file) - 1
    return chosen


def _covers(file: Path) -> int:
    try:
        metadata = pq.read_schema(file).metadata or {}
        return max(1, int(metadata.get(schema.COVERS, b"1")))
    except (OSError, ValueError, pa.ArrowException):
        return 1  # a damaged file is reported when its rows are read


def _read_file(file: Path, table: schema.Table) -> pa.Table:
    try:
        rows = pq.read_table(file, partitioning=None)
        missing = [name for name in table.schema.names if name not in rows.column_names]
        if missing:
            raise TraceError(f"{file} lacks the column {missing[0]}; it is no {table.name} table of this format.")
        return rows.select(table.schema.names).cast(table.schema)
    except (OSError, pa.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise TraceError(f"{file} cannot be read: {first_line}. Move it away to read the rest of the trace.") from None


def _frame(rows: pa.Table) -> "pd.DataFrame":
    import pandas as pd

    plain = pa.schema(
        [pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in rows.schema]
    )
    frame: pd.DataFrame = rows.cast(plain).to_pandas(types_mapper=pd.ArrowDtype)
    return frame
