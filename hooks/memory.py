"""Memory readings: the CUDA allocator's, and the process's own. Three different things, never mixed."""

import threading
from array import array
from collections.abc import Callable

import torch

from .clocks import Marks, Ready

Reading = tuple[int | None, int | None, int | None]


def allocator_reader(device: torch.device) -> Callable[[], Reading]:
    """Return a function that reads (allocated, reserved, peak) bytes of a CUDA device.

    On a device without such an allocator every reading is (None, None, None).
    """
    if device.type != "cuda":
        return lambda: (None, None, None)

    def read() -> Reading:
        stats = torch.cuda.memory_stats(device)
        return (
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            stats["allocated_bytes.all.peak"],
        )

    return read


def peak_reader(device: torch.device) -> Callable[[], tuple[int, int]]:
    """Return a function that reads (allocated, peak since the last reading) of a CUDA device.

    It resets the allocator's peak, which a program can see: for `run` alone, and untimed, for a
    reading costs more than most of what lies between two of them.
    """

    def read() -> tuple[int, int]:
        stats = torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        return stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]

    return read


class MemoryTape(threading.local):
    """A tape that reads memory at each mark, for a pass of its own that is not timed."""

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self.read = read
        self.codes = array("q")
        self.readings: list[tuple[int, int]] = []

    def mark(self, code: int) -> None:
        """Store the code with the present reading."""
        self.codes.append(code)
        self.readings.append(self.read())

    def cut(self) -> Ready:
        """Hand over the marks so far and start afresh."""
        codes, readings = self.suspend()
        return Ready(Marks(codes, array("q", [0] * len(codes)), memory=readings))

    def suspend(self) -> "tuple[array[int], list[tuple[int, int]]]":
        """Set the marks so far aside and start afresh, for a step inside a step."""
        suspended = (self.codes, self.readings)
        self.codes, self.readings = array("q"), []
        return suspended

    def resume(self, suspended: "tuple[array[int], list[tuple[int, int]]]") -> None:
        """Go on with what `suspend` set aside."""
        self.codes, self.readings = suspended


def rss_bytes() -> int | None:
    """Resident memory of this process, or None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
    except OSError:
        return None
    import resource

    return pages * resource.getpagesize()
