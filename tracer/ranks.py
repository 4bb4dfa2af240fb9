"""Which of several processes of one job this is, and where its partition of their trace lies."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lifetrace.analysis.gaps import is_claimed
from lifetrace.analysis.manifest import MANIFEST, read_manifest
from lifetrace.errors import TraceError

PATIENCE_S = 2.0
LAUNCHER = "TORCHELASTIC_RUN_ID"  # set by torchrun: only then RANK and WORLD_SIZE are of this very process
OF_JOB = (LAUNCHER, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Process:
    """One process of `world_size`; alone it is rank 0 of 1. The processes of one job have the same `job`."""

    rank: int = 0
    world_size: int = 1
    job: str | None = None

    def partition(self, folder: Path) -> Path:
        """Where this process writes: rank 0 into the folder of the trace, each other into a folder of its own there."""
        return folder if self.rank == 0 else folder / f"rank-{self.rank}"

    def run_id(self, folder: Path, own: str) -> str:
        """The id of the run, which rank 0 gives; one's own where it does not write into the folder in a moment."""
        last = time.monotonic() + PATIENCE_S
        while self.rank > 0 and time.monotonic() < last:
            of_first = _being_written(folder)
            if of_first is not None and of_first.get("job") == self.job:
                return str(of_first["run_id"])
            time.sleep(0.02)
        return own

    def check(self, folder: Path) -> None:
        """Raise TraceError where a run is written into the folder that this process is no part of."""
        of_first = _being_written(folder) if self.rank > 0 else None
        if of_first is not None and of_first.get("job") != self.job:
            raise TraceError(f"Another run writes into {folder}, and this process is no part of it; choose another.")


def _being_written(folder: Path) -> dict[str, Any] | None:
    """The manifest of the trace that a process writes there now; null also while it is none that can be read."""
    if not ((folder / MANIFEST).is_file() and is_claimed(folder)):
        return None
    try:
        return read_manifest(folder)
    except TraceError:  # removed since, or not the manifest of this run
        return None


def this_process() -> Process:
    """Ask torch.distributed, else what torchrun says in the environment."""
    if dist.is_available() and dist.is_initialized():
        return Process(dist.get_rank(), dist.get_world_size(), _job(dist.get_world_size()))
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if LAUNCHER in os.environ and rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size):
        return Process(int(rank), int(world_size), _job(int(world_size)))
    return Process()


def _job(world_size: int) -> str | None:
    """What the processes of one launch have in common; null of one alone, or where the launcher says nothing."""
    said = [os.environ.get(name, "") for name in OF_JOB]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16] if any(said) and world_size > 1 else None
