"""Reads a sweep: a folder of runs over a grid of settings, and `sweep.json` that says which."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lifetrace.errors import TraceError

from .files import replacing
from .runs import UNREADABLE, Run, run_of, table_of
from .schema import PHASES
from .trace import read_trace, trace_folders

SWEEP, TABLE, PAGE = "sweep.json", "sweep.parquet", "sweep.html"
FORMAT = 1
COMPLETE, FAILED, PENDING = "complete", "failed", "pending"
# What a point may leave to the model or the machine, and its trace then tells.
LEFT_OPEN = ("dtype", "attention", "threads")


@dataclass(frozen=True)
class Axis:
    """A setting that a sweep varies: its key, what a table heads it with, and what stands before it in a name."""

    key: str
    heading: str
    prefix: str
    is_number: bool


AXES = (
    Axis("prompt_length", "prompt", "prompt", True),
    Axis("batch", "batch", "batch", True),
    Axis("max_new_tokens", "new", "new", True),
    Axis("dtype", "dtype", "", False),
    Axis("attention", "attention", "", False),
    Axis("cache", "cache", "", False),
    Axis("threads", "threads", "threads", True),
)


@dataclass(frozen=True)
class Setting:
    """A point of the grid. Null, and the dtype `auto`, leave the choice to the model or the machine."""

    prompt_length: int
    batch: int
    max_new_tokens: int
    dtype: str = "auto"
    attention: str | None = None
    cache: str | None = None
    threads: int | None = None

    @property
    def name(self) -> str:
        """The folder of the point, such as `prompt32-batch4-new16-float32-sdpa`; what was not chosen is left out."""
        chosen = [(axis.prefix, getattr(self, axis.key)) for axis in AXES]
        parts = (f"{prefix}{value}" for prefix, value in chosen if value not in (None, "auto"))
        return "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in part) for part in parts)


def grid(axes: dict[str, Sequence[Any]]) -> list[Setting]:
    """Every combination of the values of each axis; those that share a loaded model are neighbours."""
    order = ("dtype", "attention", "threads", "cache", "prompt_length", "batch", "max_new_tokens")
    combinations = itertools.product(*(dict.fromkeys(axes[key]) for key in order))
    return [Setting(**dict(zip(order, values, strict=True))) for values in combinations]


@dataclass(frozen=True)
class Point:
    """A point and what came of it.

    `setting` names what the run really used where it was left open. `status` is that of the trace,
    or `failed` or `pending` without one; `reason` says why a point failed.
    """

    name: str
    setting: Setting
    status: str
    reason: str | None
    run: Run

    def row(self) -> dict[str, Any]:
        """One flat row, the setting's keys before those of the run that they do not replace."""
        head = {"name": self.name, "status": self.status, "reason": self.reason}
        rest = {key: value for key, value in asdict(self.run).items() if key != "error"}
        return rest | asdict(self.setting) | head


@dataclass(frozen=True)
class Head:
    """The first columns of `sweep.parquet`; those of `Setting` and of `Run` follow."""

    name: str
    status: str
    reason: str | None
    on_front: bool | None


@dataclass(frozen=True)
class Turn:
    """Between two neighbouring values of an axis, all else equal, another thing bounds a phase."""

    phase: str
    axis: Axis
    low: int
    high: int
    before: str
    after: str
    others: tuple[tuple[Axis, Any], ...]


@dataclass(frozen=True)
class Sweep:
    """All points of a sweep, in the order of its axes, and what was the same for all of them."""

    path: Path
    settings: dict[str, Any]
    versions: dict[str, Any]
    device: dict[str, Any]
    points: list[Point]

    @cached_property
    def varying(self) -> list[Axis]:
        """The axes with more than one value."""
        return [axis for axis in AXES if len({getattr(point.setting, axis.key) for point in self.points}) > 1]

    @cached_property
    def measured(self) -> list[Point]:
        """The points whose trace is complete."""
        return [point for point in self.points if point.status == COMPLETE]

    @cached_property
    def placed(self) -> list[Point]:
        """The points that have both a rate and a TPOT."""
        return [p for p in self.measured if p.run.tpot_ns is not None and p.run.decode_tokens_per_s is not None]

    @cached_property
    def front(self) -> set[str]:
        """Names of the points that no other of the same prompt length and new tokens beats.

        Beaten is who has fewer decode tokens/s and no lower TPOT, or a higher TPOT and no more tokens/s.
        """
        groups = self.same_work().values()
        return {point.name for group in groups for point in group if not _beaten(point, group)}

    def same_work(self) -> dict[tuple[int, int], list[Point]]:
        """The placed points by prompt length and new tokens: only these compete."""
        groups: dict[tuple[int, int], list[Point]] = {}
        for point in self.placed:
            groups.setdefault((point.setting.prompt_length, point.setting.max_new_tokens), []).append(point)
        return groups

    def turns(self) -> list[Turn]:
        """Where another thing becomes the bound, along each axis of numbers."""
        return [
            turn for phase in PHASES for axis in self.varying if axis.is_number for turn in self._turns(phase, axis)
        ]

    def _turns(self, phase: str, axis: Axis) -> Iterable[Turn]:
        others = [other for other in self.varying if other != axis]
        for key, line in lines(self.measured, axis, others):
            for low, high in itertools.pairwise(line):
                before, after = (getattr(point.run, f"{phase}_bound") for point in (low, high))
                if before != after and before is not None and after is not None:
                    ends = getattr(low.setting, axis.key), getattr(high.setting, axis.key)
                    yield Turn(phase, axis, *ends, before, after, tuple(zip(others, key, strict=True)))

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a point; `on_front` is null where the point has no place beside the front."""
        placed = {point.name for point in self.placed}
        return [
            point.row() | {"on_front": point.name in self.front if point.name in placed else None}
            for point in self.points
        ]

    def table(self) -> pa.Table:
        """The rows as a table, of the same columns and types for every sweep."""
        return table_of(self.rows(), Head, Setting, Run).drop_columns("error")

    def to_json(self) -> dict[str, Any]:
        """The rows, what varied and what did not, as plain dictionaries and lists."""
        return {
            "path": str(self.path),
            "settings": self.settings,
            "versions": self.versions,
            "device": self.device,
            "varying": [axis.key for axis in self.varying],
            "points": self.rows(),
            "turns": [
                asdict(turn) | {"axis": turn.axis.key, "others": {axis.key: value for axis, value in turn.others}}
                for turn in self.turns()
            ],
        }


def lines(points: Iterable[Point], axis: Axis, others: Sequence[Axis]) -> list[tuple[tuple[Any, ...], list[Point]]]:
    """The points along one axis, a list for each combination of the other axes, in their order."""
    found: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        found.setdefault(tuple(getattr(point.setting, other.key) for other in others), []).append(point)
    return [(key, sorted(line, key=lambda p: _order(getattr(p.setting, axis.key)))) for key, line in found.items()]


def _order(value: Any) -> tuple[bool, Any]:
    return (value is not None, value)


def _beaten(point: Point, by: Iterable[Point]) -> bool:
    """Whether another is better in one thing and no worse in the other."""
    return any(_better(other.run, point.run) for other in by)


def _better(one: Run, other: Run) -> bool:
    rates = (one.decode_tokens_per_s or 0.0) - (other.decode_tokens_per_s or 0.0)
    times = (other.tpot_ns or 0.0) - (one.tpot_ns or 0.0)
    return rates >= 0 and times >= 0 and (rates > 0 or times > 0)


# -- reading -----------------------------------------------------------------------------------


def is_sweep(path: Path) -> bool:
    """Whether the folder is one that `lifetrace sweep` wrote."""
    return (path / SWEEP).is_file()


def read_document(path: Path) -> dict[str, Any]:
    """What `sweep.json` holds: `format`, `command`, `settings`, `versions`, `device`, and `points`.

    Raises:
        TraceError: it cannot be read, or was written by a newer lifetrace.
    """
    file = path / SWEEP
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        points = [_setting(point) for point in document["points"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TraceError(
            f"{file} cannot be read ({type(error).__name__}: {error}). The traces beside it may still be whole; "
            "begin a new sweep in another folder."
        ) from None
    if document.get("format") != FORMAT:
        raise TraceError(f"{file} is of format {document.get('format')}, this lifetrace reads {FORMAT}. Update it.")
    document["points"] = [
        {"setting": point, "reason": row.get("reason")} for point, row in zip(points, document["points"], strict=True)
    ]
    return document


def _setting(row: dict[str, Any]) -> Setting:
    return Setting(**{field.name: row[field.name] for field in fields(Setting)})


def read_sweep(path: Path) -> Sweep:
    """Read a sweep with the figures of each of its points.

    Raises:
        TraceError: `sweep.json` cannot be read.
    """
    document = read_document(path)
    points = _settled([_point(path, row["setting"], row["reason"]) for row in document["points"]])
    return Sweep(
        path=path,
        settings=document.get("settings") or {},
        versions=document.get("versions") or {},
        device=document.get("device") or {},
        points=sorted(points, key=lambda point: [_order(getattr(point.setting, axis.key)) for axis in AXES]),
    )


def _point(path: Path, setting: Setting, reason: str | None) -> Point:
    folder = path / setting.name
    if trace_folders(folder) != [folder]:
        status = FAILED if reason else PENDING
        return Point(setting.name, setting, status, reason, Run(setting.name, status))
    try:
        run = run_of(read_trace(folder))
    except TraceError as error:
        run = Run(setting.name, UNREADABLE, str(error))
    used = _used(setting, {key: getattr(run, key) for key in LEFT_OPEN})
    return Point(setting.name, used, run.status, None if run.status == COMPLETE else reason or run.error, run)


def _used(setting: Setting, found: dict[str, Any]) -> Setting:
    """The setting with what was found in place of what it left open."""
    return replace(setting, **{key: found[key] for key in LEFT_OPEN if _is_open(setting, key) and found.get(key)})


def _is_open(setting: Setting, key: str) -> bool:
    return getattr(setting, key) in (None, "auto")


def _settled(points: list[Point]) -> list[Point]:
    """Say of points without a trace what the others, which left the same open, turned out to use."""
    found = {key: getattr(point.run, key) for point in points for key in LEFT_OPEN if getattr(point.run, key)}
    return [replace(point, setting=_used(point.setting, found)) for point in points]


def write_table(sweep: Sweep) -> Path:
    """Write `sweep.parquet` into the folder, a row a point.

    Raises:
        TraceError: it cannot be written.
    """
    path = sweep.path / TABLE
    with replacing(path, "table") as file:
        pq.write_table(sweep.table(), file)
    return path
