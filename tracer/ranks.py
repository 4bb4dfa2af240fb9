"""Which of several processes of one job this is, and where its partition of their trace lies."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lifetrace.analysis.gaps import is_claimed
from lifetrace.analysis.manifest import MANIFEST, read_manifest
from lifetrace.errors import TraceError

PATIENCE_S = 2.0


@dataclass(frozen=True)
class Process:
    """One process of `world_size`; alone it is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1

    def partition(self, folder: Path) -> Path:
        """Where this process writes: rank 0 into the folder of the trace, each other into a folder of its own there."""
        return folder if self.rank == 0 else folder / f"rank-{self.rank}"

    def run_id(self, folder: Path, own: str) -> str:
        """The id of the run, which rank 0 gives; one's own where it does not write into the folder in a moment."""
        last = time.monotonic() + PATIENCE_S
        while self.rank > 0 and time.monotonic() < last:
            if (folder / MANIFEST).is_file() and is_claimed(folder):
                try:
                    return str(read_manifest(folder)["run_id"])
                except TraceError:  # what is there is not the manifest of this run
                    return own
            time.sleep(0.02)
        return own


def this_process() -> Process:
    """Ask torch.distributed, else what torchrun says in the environment."""
    if dist.is_available() and dist.is_initialized():
        return Process(dist.get_rank(), dist.get_world_size())
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size):
        return Process(int(rank), int(world_size))
    return Process()
