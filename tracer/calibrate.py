"""Measures what this device reaches: matrix products, memory, matrix–vector products, launching an operator.

Each figure is the median of many short rounds after one warm-up, with its quartiles. What is
measured is kept in the user's cache directory, one file a device, library version and thread count.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from lifetrace.analysis.ceilings import (
    MEASURED,
    BandwidthPoint,
    Ceilings,
    DeviceKey,
    Figure,
    MatmulPoint,
    Quietness,
    RowPoint,
    faster,
)
from lifetrace.hooks.operators import count_operators

from . import environment

Progress = Callable[[str], None]
KIB, MIB, GIB = 2**10, 2**20, 2**30
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_ROUNDS, MAX_CALLS = 3, 200
QUIET_SPREAD, SPREAD_NS = 0.25, 500_000_000
# Cores that other programs may keep busy: a sliver of a small machine, a few of a large one.
QUIET_OTHERS, QUIET_OTHERS_OF_CORES = 0.15, 0.05


class Timer(Protocol):
    """Tells how long work takes on a device."""

    def time_ns(self, work: Callable[[], object]) -> int:
        """Do the work and return its time on the device in ns."""


class HostTimer:
    """Times work that is done when the call returns."""

    def time_ns(self, work: Callable[[], object]) -> int:
        """Do the work once."""
        start = time.perf_counter_ns()
        work()
        return time.perf_counter_ns() - start


class CudaTimer:
    """Times work on the current CUDA stream with a pair of events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time_ns(self, work: Callable[[], object]) -> int:
        """Do the work and wait for it."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        work()
        end.record()
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)


@dataclass(frozen=True)
class Plan:
    """What is measured and how long.

    Sizes of matrices in elements, of working sets in bytes. A figure takes about `figure_ns`, a round
    of it so many calls that they do `round_flops` or touch `round_bytes`, at most `MAX_CALLS`.
    """

    matmul_sizes: tuple[int, ...]
    working_sets: tuple[int, ...]
    matvec_sets: tuple[int, ...]
    rows: tuple[int, ...]
    figure_ns: int
    max_rounds: int = 200
    launch_operators: int = 300
    round_flops: int = 4_000_000
    round_bytes: int = 4 * MIB
    matrix_bytes: int = 16 * MIB

    def calls(self, amount: float, of_round: int) -> int:
        """Calls of such an amount in a round."""
        return min(MAX_CALLS, max(1, int(of_round / amount)))


def plan_for(device: torch.device, quick: bool, free_bytes: int | None = None) -> Plan:
    """The sizes for a device: up to what no cache holds, and within an eighth of the free memory."""
    plan = _cuda_plan(quick) if device.type == "cuda" else _cpu_plan(quick)
    most = (free_bytes or 8 * GIB) // 8
    return replace(plan, working_sets=_up_to(plan.working_sets, most), matvec_sets=_up_to(plan.matvec_sets, most))


def _cpu_plan(quick: bool) -> Plan:
    """About half a minute from the second cache to 1 GiB, or a few seconds."""
    if quick:
        sets = (MIB, 8 * MIB, 64 * MIB, 512 * MIB)
        return Plan((256, 1024), sets, sets[2:], (4, 32, 256), figure_ns=30_000_000)
    return Plan(
        matmul_sizes=(64, 128, 256, 512, 1024, 2048),
        working_sets=tuple(256 * KIB * 2**step for step in range(13)),
        matvec_sets=tuple(MIB * 4**step for step in range(6)),
        rows=(2, 4, 8, 16, 32, 64, 128, 256, 512),
        figure_ns=300_000_000,
    )


def _cuda_plan(quick: bool) -> Plan:
    """Rounds of milliseconds, sizes that take longer than their launch: what is smaller has no ceiling but that."""
    plan = Plan(
        matmul_sizes=(512, 1024, 2048, 4096, 8192),
        working_sets=tuple(16 * MIB * 2**step for step in range(9)),
        matvec_sets=tuple(256 * MIB * 2**step for step in range(5)),
        rows=(2, 4, 8, 16, 32, 64, 128, 256, 512),
        figure_ns=200_000_000,
        launch_operators=600,
        round_flops=10**12,
        round_bytes=4 * GIB,
        matrix_bytes=128 * MIB,
    )
    if not quick:
        return plan
    sets = (32 * MIB, 512 * MIB)
    return replace(
        plan, matmul_sizes=(4096,), working_sets=sets, matvec_sets=sets[1:], rows=(4, 32, 256), figure_ns=50_000_000
    )


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= most) or (max(most, 64 * KIB),)


class Buffer:
    """Memory that is allocated once and used by every measurement: touching fresh pages is slow.

    It holds a random block over and over: zeros would let some hardware run faster than on data.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device = device
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._dtype: torch.dtype | None = None

    def values(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The first so many values as one row of a dtype, those of another dtype being lost."""
        whole = self._bytes[: len(self._bytes) // dtype.itemsize * dtype.itemsize].view(dtype)
        if dtype != self._dtype:
            block = random_values(self.device, dtype, min(len(whole), 4 * MIB))
            for start in range(0, len(whole), len(block)):
                target = whole[start : start + len(block)]
                target.copy_(block[: len(target)])
            self._dtype = dtype
        return whole[:count]

    def matrices(self, dtype: torch.dtype, total_bytes: int, most_bytes: int) -> list[torch.Tensor]:
        """Square matrices, each of so many bytes at most, of so many bytes together."""
        one_bytes = min(total_bytes, most_bytes)
        width = math.isqrt(one_bytes // dtype.itemsize)
        number = max(1, total_bytes // one_bytes)
        return list(self.values(dtype, number * width * width).view(number, width, width))


def random_values(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values in [0, 1)."""
    return torch.rand(*shape, device=device, dtype=torch.float32).to(dtype)


# -- measuring -------------------------------------------------------------------------------


def calibrate(
    device: torch.device,
    quick: bool = False,
    progress: Progress = lambda text: None,
    timer: Timer | None = None,
    plan: Plan | None = None,
) -> Ceilings:
    """Measure a device: twice over in about a minute, the faster figures kept; `quick` once in a few seconds.

    The random state is left as it was. Dtypes that the device cannot multiply are left out.
    """
    timer = timer or timer_for(device)
    plan = plan or plan_for(device, quick, free_memory(device))
    if quick:
        return _measure(device, quick, progress, timer, plan)
    first = _measure(device, quick, lambda text: progress(f"{text}, 1/2"), timer, plan)
    return faster(first, _measure(device, quick, lambda text: progress(f"{text}, 2/2"), timer, plan))


def _measure(device: torch.device, quick: bool, progress: Progress, timer: Timer, plan: Plan) -> Ceilings:
    """Measure everything once."""
    watch = LoadWatch()
    with _undisturbing(device), torch.no_grad():
        progress("calibrating: is the machine quiet")
        spread = kernel_spread(device, timer)
        progress("calibrating: launching operators")
        launch = launch_ns(device, timer, plan)
        progress("calibrating: memory bandwidth")
        buffer = Buffer(device, max(plan.working_sets + plan.matvec_sets))
        read = tuple(read_point(buffer, size, timer, plan) for size in plan.working_sets)
        copy = tuple(copy_point(buffer, size, timer, plan) for size in plan.working_sets)
        matmul, matvec, linear = _products(buffer, timer, plan, progress)
        host_to_device = host_to_device_figure(device, timer, plan)
        del buffer
    return Ceilings(
        source=MEASURED,
        device=device_key(device),
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        quick=quick,
        matmul=matmul,
        read=read,
        copy=copy,
        matvec=matvec,
        linear=linear,
        launch_ns=launch,
        host_to_device_bytes_per_s=host_to_device,
        quietness=quietness(spread, watch.others_cpu(), watch.load_average),
    )


@contextlib.contextmanager
def _undisturbing(device: torch.device) -> Iterator[None]:
    """Leave the random state, the current device and the allocator's reserve as they were."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    with torch.cuda.device(device), torch.random.fork_rng(devices=[device]):
        yield
    torch.cuda.empty_cache()


def _products(
    buffer: Buffer, timer: Timer, plan: Plan, progress: Progress
) -> tuple[dict[str, tuple[MatmulPoint, ...]], dict[str, tuple[BandwidthPoint, ...]], dict[str, tuple[RowPoint, ...]]]:
    """Matrix products, matrix–vector products and what lies between, of each dtype that the device has."""
    device = buffer.device
    matmul, matvec, linear = {}, {}, {}
    for dtype in DTYPES:
        if not _has(device, dtype):
            continue
        name = str(dtype).removeprefix("torch.")
        progress(f"calibrating: {name} products")
        matmul[name] = tuple(matmul_points(device, dtype, timer, plan))
        matvec[name] = tuple(matvec_point(buffer, dtype, size, timer, plan) for size in plan.matvec_sets)
        linear[name] = tuple(row_points(buffer, dtype, timer, plan))
    if device.type == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            matmul["tf32"] = tuple(matmul_points(device, torch.float32, timer, plan))
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    return matmul, matvec, linear


def _has(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of a dtype."""
    try:
        small = torch.ones(8, 8, device=device, dtype=dtype)
        return bool((small @ small)[0, 0].item() == 8)
    except (RuntimeError, TypeError):
        return False


def rounds_ns(work: Callable[[], object], timer: Timer, plan: Plan) -> list[int]:
    """Time rounds of work after one warm-up until the figure's time is used up, its own not counting.

    Three at least, unless they take four times as long: on a machine that is busy with other things
    a round may take a hundred times what it should.
    """
    timer.time_ns(work)
    times: list[int] = []
    spent_ns = 0
    while not times or spent_ns < plan.figure_ns * (4 if len(times) < MIN_ROUNDS else 1):
        times.append(max(1, timer.time_ns(work)))
        spent_ns += times[-1]
        if len(times) == plan.max_rounds:
            break
    return times


def figure(values: Sequence[float]) -> Figure:
    """Median and quartiles of some rounds."""
    if len(values) == 1:
        return Figure(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Figure(float(median(values)), float(low), float(high))


def _rate(amount: float, times_ns: Sequence[float]) -> Figure:
    return figure([amount / time_ns * 1e9 for time_ns in times_ns])


def matmul_points(device: torch.device, dtype: torch.dtype, timer: Timer, plan: Plan) -> Iterator[MatmulPoint]:
    """Square products of growing size, then wide ones; a size that would take longer than its time is left out."""
    largest = 0
    for size in plan.matmul_sizes:
        point, once_ns = _matmul((size, size, size), device, dtype, timer, plan)
        yield point
        largest = size
        if once_ns * 8 * (MIN_ROUNDS + 1) > 3 * plan.figure_ns:
            break
    # Inference multiplies few rows by wide weights; some libraries are faster there than on squares.
    for shape in ((largest // 2, 2 * largest, largest), (largest // 4, 2 * largest, 2 * largest)):
        yield _matmul(shape, device, dtype, timer, plan)[0]


def _matmul(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, timer: Timer, plan: Plan
) -> tuple[MatmulPoint, float]:
    m, n, k = shape
    x, weight = random_values(device, dtype, m, k), random_values(device, dtype, n, k)
    inner = plan.calls(2 * m * n * k, plan.round_flops)
    times = rounds_ns(lambda: [F.linear(x, weight) for _ in range(inner)], timer, plan)
    return MatmulPoint(shape, _rate(2.0 * m * n * k * inner, times)), median(times) / inner


def read_point(buffer: Buffer, working_set_bytes: int, timer: Timer, plan: Plan) -> BandwidthPoint:
    """Reading so many bytes over and over: the fastest of a sum, a dot product and a matrix–vector product.

    What the call itself costs, timed on a few elements, is taken off: launching has its own ceiling.
    """
    data = buffer.values(torch.float32, working_set_bytes // 4)
    ways = (torch.sum, _dot, _rows_by_vector)
    found = [_net_rate(work, data, working_set_bytes, timer, plan) for work in ways]
    return BandwidthPoint(working_set_bytes, max(found, key=lambda rate: rate.median))


def _dot(data: torch.Tensor) -> torch.Tensor:
    return torch.dot(data, data)


def _rows_by_vector(data: torch.Tensor) -> torch.Tensor:
    width = min(1024, data.numel())
    return torch.mv(data.view(-1, width), data[:width])


def copy_point(buffer: Buffer, working_set_bytes: int, timer: Timer, plan: Plan) -> BandwidthPoint:
    """Copying one half of a buffer of this size to the other; each byte counts as read and as written."""
    source, target = buffer.values(torch.float32, working_set_bytes // 8 * 2).view(2, -1)

    def copy(data: torch.Tensor) -> object:
        return target[: data.numel()].copy_(data)

    return BandwidthPoint(working_set_bytes, _net_rate(copy, source, working_set_bytes, timer, plan))


def _net_rate(
    work: Callable[[torch.Tensor], object], data: torch.Tensor, count: int, timer: Timer, plan: Plan
) -> Figure:
    """Bytes a second of some work, without the cost of calling it; at most half the time is taken off."""
    inner, small = plan.calls(count, plan.round_bytes), data[:16]
    briefly = replace(plan, figure_ns=plan.figure_ns // 20)
    call_ns = median(rounds_ns(lambda: [work(small) for _ in range(16)], timer, briefly)) / 16
    times = rounds_ns(lambda: [work(data) for _ in range(inner)], timer, plan)
    return _rate(count * inner, [time_ns - min(call_ns * inner, time_ns / 2) for time_ns in times])


def matvec_point(
    buffer: Buffer, dtype: torch.dtype, working_set_bytes: int, timer: Timer, plan: Plan
) -> BandwidthPoint:
    """One row times matrices that together have this size, each in turn, as a decode step does."""
    weights = buffer.matrices(dtype, working_set_bytes, plan.matrix_bytes)
    times = _linear_ns(weights, 1, timer, plan)
    return BandwidthPoint(working_set_bytes, _rate(weights[0].numel() * dtype.itemsize, times))


def row_points(buffer: Buffer, dtype: torch.dtype, timer: Timer, plan: Plan) -> Iterator[RowPoint]:
    """A few rows times matrices that together have the largest working set of the plan."""
    weights = buffer.matrices(dtype, plan.matvec_sets[-1], plan.matrix_bytes)
    for rows in (1, *plan.rows):
        times = _linear_ns(weights, rows, timer, plan)
        yield RowPoint(rows, _rate(2.0 * rows * weights[0].numel(), times))


def _linear_ns(weights: Sequence[torch.Tensor], rows: int, timer: Timer, plan: Plan) -> list[float]:
    """Time of one product, over rounds that go on through the matrices where the last one stopped."""
    x = random_values(weights[0].device, weights[0].dtype, rows, weights[0].shape[1])
    at_once = plan.calls(weights[0].numel() * weights[0].element_size(), plan.round_bytes)
    turn = itertools.cycle(weights)

    def work() -> None:
        for weight in itertools.islice(turn, at_once):
            F.linear(x, weight)

    return [time_ns / at_once for time_ns in rounds_ns(work, timer, plan)]


class _Norm(nn.Module):
    """RMS norm as models write it, operator by operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x * scale)


class TinyLayer(nn.Module):
    """A decoder layer so small that its time is that of launching: modules, views and Python as in a real one."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = _Norm(width), _Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, past: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """One position [1, 1, width] after those of `past` [1, heads, n, width ÷ heads]."""
        y = self.norm_1(x)
        q, k, v = (self._split(project(y)) for project in (self.q, self.k, self.v))
        q, k = self._rotate(q, angles), self._rotate(k, angles)
        keys, values = torch.cat((past, k), dim=2), torch.cat((past, v), dim=2)
        attended = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        y = self.norm_2(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, 1, self.heads, -1).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * angles + turned * angles


def launch_ns(device: torch.device, timer: Timer, plan: Plan) -> Figure:
    """What one operator costs when its data is tiny: the time of a tiny decoder layer ÷ its operators.

    Views are not counted as operators; they, the module calls and the Python between belong to the
    cost, for no model runs without them.
    """
    layer = TinyLayer().to(device)
    x, past, angles = (random_values(device, torch.float32, *shape) for shape in ((1, 1, 64), (1, 4, 8, 16), (16,)))
    operators = count_operators(lambda: layer(x, past, angles))
    calls = max(1, plan.launch_operators // operators)
    times = rounds_ns(lambda: [layer(x, past, angles) for _ in range(calls)], timer, plan)
    return figure([time_ns / (calls * operators) for time_ns in times])


def host_to_device_figure(device: torch.device, timer: Timer, plan: Plan) -> Figure | None:
    """Copying 64 MiB from pinned host memory; null where host and device share their memory."""
    if device.type != "cuda":
        return None
    source = torch.empty(64 * MIB, dtype=torch.uint8).pin_memory()
    target = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    times = rounds_ns(lambda: target.copy_(source, non_blocking=True), timer, plan)
    return _rate(64 * MIB, times)


# -- is the machine quiet ----------------------------------------------------------------------


def kernel_spread(device: torch.device, timer: Timer, rounds: int = 150) -> float:
    """(p90 − p10) ÷ median of a small fixed piece of work: what equal work differs by, after a short warm-up.

    Half a second at most.
    """
    x = random_values(device, torch.float32, 192, 192)
    times: list[int] = []
    while len(times) < 10 or (len(times) < rounds + 10 and sum(times) < SPREAD_NS):
        times.append(timer.time_ns(lambda: [x @ x for _ in range(5)]))
    times = times[5:]
    deciles = quantiles(times, n=10)
    return (deciles[8] - deciles[0]) / max(1.0, median(times))


class LoadWatch:
    """Sees how many cores other programs keep busy from its making on; on Linux, else null."""

    def __init__(self) -> None:
        try:
            self.load_average: float | None = os.getloadavg()[0]
        except (AttributeError, OSError):
            self.load_average = None
        self._start = self._reading()

    def others_cpu(self) -> float | None:
        """Cores busy with other programs, or taken by the hypervisor, on average since then."""
        end = self._reading()
        if end is None or self._start is None or end[0] <= self._start[0]:
            return None
        wall, busy, own = (now - then for now, then in zip(end, self._start, strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _reading() -> tuple[float, float, float] | None:
        """Seconds: on the clock, of all cores busy, of this process on a core."""
        try:
            first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
            ticks = [int(value) for value in first[1:9]]
            busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        return time.perf_counter(), busy, time.process_time()


def quietness(spread: float, others_cpu: float | None, load_average: float | None) -> Quietness:
    """Judge whether other work disturbed the figures; the load average only where nothing better is known."""
    most = max(QUIET_OTHERS, QUIET_OTHERS_OF_CORES * (os.cpu_count() or 1))
    loaded = others_cpu > most if others_cpu is not None else (load_average or 0.0) > 1.0
    return Quietness(spread <= QUIET_SPREAD and not loaded, spread, others_cpu, load_average)


# -- the device --------------------------------------------------------------------------------


def timer_for(device: torch.device) -> Timer:
    """The clock of a device."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; null where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def device_key(device: torch.device) -> DeviceKey:
    """What a calibration of this device, library and thread count is kept under."""
    facts = environment.device_facts(device)
    return DeviceKey(
        type=device.type,
        name=str(facts["name"]),
        driver=facts.get("cuda"),
        threads=int(facts["threads"]),
        torch=environment.versions()["torch"],
    )


# -- the store ---------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where calibrations lie: `$LIFETRACE_CACHE`, else `$XDG_CACHE_HOME/lifetrace`, by default `~/.cache/lifetrace`."""
    own = os.environ.get("LIFETRACE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lifetrace"


def cache_file(key: DeviceKey, folder: Path | None = None) -> Path:
    """The file of one device: readable name, and a hash of all that tells it from others."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:12]
    words = re.sub(r"[^a-z0-9]+", "-", f"{key.name} {key.threads} threads".casefold()).strip("-")[:60]
    return (folder or cache_folder()) / f"calibration-{words}-{digest}.json"


def store(ceilings: Ceilings, folder: Path | None = None) -> str | None:
    """Keep a calibration; return a note where the disk does not take it, else null."""
    file = cache_file(ceilings.device, folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="ascii") as out:
            json.dump(ceilings.to_json(), out, indent=1)
        os.replace(out.name, file)
    except OSError as error:
        return f"the calibration could not be kept in {file}: {error.strerror or error}"
    return None


def keep(ceilings: Ceilings, folder: Path | None = None) -> tuple[str | None, list[str]]:
    """Store a calibration unless a better one is there, a full one or an undisturbed one of the same kind.

    Returns its file and notes.
    """
    file = str(cache_file(ceilings.device, folder))
    before, _ = load(ceilings.device, folder)
    if before is not None and ceilings.quick and not before.quick:
        return file, ["a full calibration of this device is kept already; this quick one does not replace it"]
    is_alike = before is not None and before.quick == ceilings.quick
    if before is not None and is_alike and _was_quiet(before) and not _was_quiet(ceilings):
        return file, ["a calibration of a quiet machine is kept already; this disturbed one does not replace it"]
    note = store(ceilings, folder)
    return (None, [note]) if note else (file, [])


def load(key: DeviceKey, folder: Path | None = None) -> tuple[Ceilings | None, str | None]:
    """The calibration kept for a device, or null; and a note where there is one that cannot be used."""
    file = cache_file(key, folder)
    try:
        ceilings = Ceilings.from_json(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"the calibration in {file} cannot be read and is not used: {error}"
    if ceilings.device != key:
        return None, f"the calibration in {file} is of another device and is not used"
    return ceilings, None


def ceilings_for(
    device: torch.device, progress: Progress = lambda text: None, folder: Path | None = None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The manifest's `ceilings` for a device, and notes: what is kept, else measured briefly and kept.

    A brief one that was disturbed is measured anew, and the faster figures of both are kept.
    Null where measuring failed, for want of memory beside a model for instance; the notes say why.
    """
    found, note = load(device_key(device), folder)
    notes = [note] if note else []
    if found is None or (found.quick and not _was_quiet(found)):
        try:
            measured = calibrate(device, quick=True, progress=progress)
        except (RuntimeError, MemoryError) as error:
            return None, [*notes, f"the device's ceilings could not be measured: {str(error).partition(chr(10))[0]}"]
        found = measured if found is None else faster(found, measured)
        notes += keep(found, folder)[1]
    if not _was_quiet(found):
        notes.append("the machine was not quiet while its ceilings were measured; run `lifetrace calibrate` when it is")
    return found.to_json(), notes


def _was_quiet(ceilings: Ceilings) -> bool:
    return ceilings.quietness is None or ceilings.quietness.quiet
