"""What a device can do at most: the figures that `lifetrace calibrate` measures, or those of a datasheet.

This is the layout of the manifest's key `ceilings` and of the stored calibrations; whoever
measures fills it, whoever judges reads it. Every rate is per second, every figure a median with
its quartiles over many short rounds.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from . import hardware

MEASURED = "measured by lifetrace calibrate"
FORMAT = 1


@dataclass(frozen=True)
class Figure:
    """A measured quantity: median of the rounds, lower and upper quartile."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class MatmulPoint:
    """What the product of an m × k by a k × n matrix reaches; the shape is null in a datasheet."""

    shape: tuple[int, int, int] | None
    flops_per_s: Figure


@dataclass(frozen=True)
class BandwidthPoint:
    """Bytes a second when the bytes touched in turn are so many."""

    working_set_bytes: int
    bytes_per_s: Figure


@dataclass(frozen=True)
class RowPoint:
    """What a weight product reaches with so many rows of activations; 1 is a matrix–vector product."""

    rows: int
    flops_per_s: Figure


Point = TypeVar("Point", MatmulPoint, BandwidthPoint, RowPoint)


@dataclass(frozen=True)
class DeviceKey:
    """What a calibration holds for: another name, library or thread count is another device.

    `driver` is the CUDA version that torch was built with; null on a CPU.
    """

    type: str
    name: str
    driver: str | None
    threads: int
    torch: str | None


@dataclass(frozen=True)
class Quietness:
    """Whether the machine did little else while it was measured.

    `spread`: (p90 − p10) ÷ median of a small fixed kernel. `others_cpu`: cores that other programs
    kept busy meanwhile. `load_average`: over the minute before, this program included.
    """

    quiet: bool
    spread: float
    others_cpu: float | None
    load_average: float | None


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of one device; an empty table or null where a quantity is not known.

    `matmul`, `matvec` and `linear` are by torch's name of the dtype, and `tf32`. `read` counts bytes
    read, `copy` bytes read and bytes written. `matvec` counts the bytes of the matrix that a
    matrix–vector product reads. `launch_ns`: what one more operator costs however small its work.
    """

    source: str
    device: DeviceKey
    created: str | None = None
    quick: bool = False
    matmul: dict[str, tuple[MatmulPoint, ...]] = field(default_factory=dict)
    read: tuple[BandwidthPoint, ...] = ()
    copy: tuple[BandwidthPoint, ...] = ()
    matvec: dict[str, tuple[BandwidthPoint, ...]] = field(default_factory=dict)
    linear: dict[str, tuple[RowPoint, ...]] = field(default_factory=dict)
    launch_ns: Figure | None = None
    host_to_device_bytes_per_s: Figure | None = None
    quietness: Quietness | None = None

    @property
    def measured(self) -> bool:
        """Whether these figures were measured, not read from a datasheet."""
        return self.source == MEASURED

    def best_matmul(self, dtype: str) -> MatmulPoint | None:
        """The shape of a matrix product that is fastest in this dtype."""
        return max(self.matmul.get(dtype, ()), key=lambda point: point.flops_per_s.median, default=None)

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """FLOP/s of the best matrix product in this dtype."""
        best = self.best_matmul(dtype)
        return best.flops_per_s.median if best else None

    def read_bytes_per_s(self, working_set_bytes: float | None) -> float | None:
        """Bandwidth of reading at a working set; at the largest one measured where it is null."""
        return bandwidth_at(self.read, working_set_bytes)

    def copy_bytes_per_s(self, working_set_bytes: float | None) -> float | None:
        """Bandwidth of copying, bytes read and written together, at a working set."""
        return bandwidth_at(self.copy, working_set_bytes)

    def matvec_bytes_per_s(self, dtype: str, working_set_bytes: float | None) -> float | None:
        """Bytes a second that a matrix–vector product reads at a working set of matrices."""
        return bandwidth_at(self.matvec.get(dtype, ()), working_set_bytes)

    def linear_flops_per_s(self, dtype: str, rows: float) -> float | None:
        """FLOP/s of a weight product with so many rows, weights not in a cache; null below what was measured."""
        points = [(point.rows, point.flops_per_s.median) for point in self.linear.get(dtype, ())]
        return _interpolate(sorted(points), rows) if points and rows >= min(points)[0] else None

    def to_json(self) -> dict[str, Any]:
        """The same as plain dictionaries, lists and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT} | asdict(self), allow_nan=False))
        return plain

    @classmethod
    def from_json(cls, document: Any) -> "Ceilings":
        """Read what `to_json` gave.

        Raises:
            ValueError: it is something else, or holds a rate that is no positive number.
        """
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r} is not {FORMAT}")
            return _ceilings(document)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"no ceilings of lifetrace: {type(error).__name__} {error}") from None


def faster(first: Ceilings, second: Ceilings) -> Ceilings:
    """Of two measurements of one device the faster figure of each, and the quieter's quietness.

    Other work only ever slows a round down, so the faster is nearer to the ceiling.
    """

    def by_dtype(
        one: dict[str, tuple[Point, ...]], other: dict[str, tuple[Point, ...]]
    ) -> dict[str, tuple[Point, ...]]:
        return {dtype: _faster_points(one.get(dtype, ()), other.get(dtype, ())) for dtype in one | other}

    quiet = [found for found in (first.quietness, second.quietness) if found is not None]
    return replace(
        second,
        quick=first.quick and second.quick,
        matmul=by_dtype(first.matmul, second.matmul),
        read=_faster_points(first.read, second.read),
        copy=_faster_points(first.copy, second.copy),
        matvec=by_dtype(first.matvec, second.matvec),
        linear=by_dtype(first.linear, second.linear),
        launch_ns=min(
            (cost for cost in (first.launch_ns, second.launch_ns) if cost is not None),
            key=lambda cost: cost.median,
            default=None,
        ),
        host_to_device_bytes_per_s=max(
            (
                rate
                for rate in (first.host_to_device_bytes_per_s, second.host_to_device_bytes_per_s)
                if rate is not None
            ),
            key=lambda rate: rate.median,
            default=None,
        ),
        quietness=min(quiet, key=lambda found: (not found.quiet, found.others_cpu or 0.0, found.spread), default=None),
    )


def _faster_points(first: tuple[Point, ...], second: tuple[Point, ...]) -> tuple[Point, ...]:
    """The faster of the points at each size, in the order of the sizes."""
    best: dict[Any, Point] = {}
    for point in first + second:
        size, rate = _size_and_rate(point)
        if size not in best or rate > _size_and_rate(best[size])[1]:
            best[size] = point
    return tuple(best.values())


def _size_and_rate(point: MatmulPoint | BandwidthPoint | RowPoint) -> tuple[Any, float]:
    """What tells a point from the others of its table, and its rate a second."""
    if isinstance(point, BandwidthPoint):
        return point.working_set_bytes, point.bytes_per_s.median
    return point.rows if isinstance(point, RowPoint) else point.shape, point.flops_per_s.median


def from_datasheet(name: str, type_: str = "cuda") -> Ceilings | None:
    """The vendor's figures for a device by its name; null where the table does not know it.

    They hold for any working set; launch cost and what kernels reach are not in a datasheet.
    """
    sheet = hardware.find(name)
    if sheet is None:
        return None
    return Ceilings(
        source=f"datasheet: {sheet.source} ({sheet.name})",
        device=DeviceKey(type_, name, None, 0, None),
        matmul={dtype: (MatmulPoint(None, _exactly(peak)),) for dtype, peak in sheet.peaks().items()},
        read=(BandwidthPoint(0, _exactly(sheet.bandwidth_bytes_per_s)),),
        copy=(BandwidthPoint(0, _exactly(sheet.bandwidth_bytes_per_s)),),
    )


def of_manifest(meta: dict[str, Any]) -> tuple[Ceilings | None, str | None]:
    """The ceilings of a trace: those recorded with it, else the datasheet's, else null; and what to note.

    A stored trace never changes its verdict: what was measured elsewhere or later is not used.
    """
    note = None
    if meta.get("ceilings") is not None:
        try:
            return Ceilings.from_json(meta["ceilings"]), None
        except ValueError as error:
            note = f"the trace's ceilings cannot be read: {error}"
    device = meta.get("device")
    device = device if isinstance(device, dict) else {}
    name = str(device.get("name") or "")
    found = from_datasheet(name, str(device.get("type") or "cuda"))
    if found is not None or note is not None:
        return found, note
    near = hardware.near_matches(name)
    like = f"; the table has {', '.join(near)}" if near else ""
    return None, f"no ceilings are known for {name or 'this device'}{like}: nothing can be judged without them"


def bandwidth_at(points: Sequence[BandwidthPoint], working_set_bytes: float | None) -> float | None:
    """Bandwidth at a working set, between the measured ones on the logarithm of their size."""
    pairs = sorted((point.working_set_bytes, point.bytes_per_s.median) for point in points)
    if not pairs:
        return None
    return pairs[-1][1] if working_set_bytes is None else _interpolate(pairs, working_set_bytes)


def _interpolate(pairs: Sequence[tuple[float, float]], at: float) -> float:
    """Linear in the logarithm of x between neighbours; the end's value beyond the ends."""
    if at <= pairs[0][0]:
        return pairs[0][1]
    for (x0, y0), (x1, y1) in pairwise(pairs):
        if at <= x1:
            share = (math.log(at) - math.log(x0)) / (math.log(x1) - math.log(x0)) if x0 > 0 else 1.0
            return y0 + (y1 - y0) * share
    return pairs[-1][1]


def _exactly(value: float) -> Figure:
    return Figure(value, value, value)


# -- reading JSON ------------------------------------------------------------------------------


def _ceilings(document: dict[str, Any]) -> Ceilings:
    quietness, device = document["quietness"], document["device"]
    return Ceilings(
        source=str(document["source"]),
        device=DeviceKey(**{name: device[name] for name in DeviceKey.__dataclass_fields__}),
        created=document["created"],
        quick=bool(document["quick"]),
        matmul=_by_dtype(document["matmul"], _matmul_point),
        read=tuple(_bandwidth_point(point) for point in document["read"]),
        copy=tuple(_bandwidth_point(point) for point in document["copy"]),
        matvec=_by_dtype(document["matvec"], _bandwidth_point),
        linear=_by_dtype(document["linear"], _row_point),
        launch_ns=_figure(document["launch_ns"]) if document["launch_ns"] is not None else None,
        host_to_device_bytes_per_s=_figure(document["host_to_device_bytes_per_s"])
        if document["host_to_device_bytes_per_s"] is not None
        else None,
        quietness=Quietness(**{name: quietness[name] for name in Quietness.__dataclass_fields__})
        if quietness is not None
        else None,
    )


def _by_dtype(tables: dict[str, Any], read: Callable[[Any], Point]) -> dict[str, tuple[Point, ...]]:
    return {str(dtype): tuple(read(point) for point in points) for dtype, points in tables.items()}


def _matmul_point(point: dict[str, Any]) -> MatmulPoint:
    shape = point["shape"]
    return MatmulPoint((shape[0], shape[1], shape[2]) if shape is not None else None, _figure(point["flops_per_s"]))


def _bandwidth_point(point: dict[str, Any]) -> BandwidthPoint:
    return BandwidthPoint(int(point["working_set_bytes"]), _figure(point["bytes_per_s"]))


def _row_point(point: dict[str, Any]) -> RowPoint:
    return RowPoint(int(point["rows"]), _figure(point["flops_per_s"]))


def _figure(numbers: dict[str, Any]) -> Figure:
    """Rates divide: zero, negative, infinite and not-a-number are refused here, once for all readers."""
    values = [float(numbers[name]) for name in ("median", "low", "high")]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{values} are no positive numbers")
    return Figure(*values)
