"""What a trace says of the machine, the libraries and the model that it came from."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

DISTRIBUTIONS = ("torch", "transformers", "accelerate", "pyarrow", "tokenizers")


def versions() -> dict[str, str | None]:
    """Versions of lifetrace, Python and the libraries that shape a run."""
    found: dict[str, str | None] = {"lifetrace": _version("lifetrace-llm"), "python": platform.python_version()}
    found |= {name: _version(name) for name in DISTRIBUTIONS}
    found["platform"] = platform.platform()
    return found


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def device_facts(device: torch.device) -> dict[str, Any]:
    """Type, name, memory, and what else decides the speed of a device: threads, or the CUDA version."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
        }
    return {
        "type": device.type,
        "name": _cpu_name() if device.type == "cpu" else device.type,
        "memory_bytes": _host_memory(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _host_memory() -> int | None:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
