"""Memory readings: the CUDA allocator's, and the process's own. Three different things, never mixed."""

from collections.abc import Callable

import torch

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


def rss_bytes() -> int | None:
    """Resident memory of this process, or None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
    except OSError:
        return None
    import resource

    return pages * resource.getpagesize()
