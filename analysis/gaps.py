"""What a trace lacks, in sentences: of a run that goes on still, that was killed, or that lost a file."""

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

# The file that a writer holds a lock on while it writes into the folder.
CLAIM = ".writing"
# What a file system says that has no locks, as some network ones.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
RUNNING = "the run goes on still: counts and tokens come when it ends"
KILLED = (
    "the run did not come to its end: it was killed, or its disk was full; the steps up to the last part written are "
    "here, counts and tokens are not"
)


def is_claimed(folder: Path) -> bool:
    """Whether a process is writing into the folder now; a reader may ask."""
    try:
        handle = os.open(folder / CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno in NO_LOCKS
    finally:
        os.close(handle)
    return False


def status_gap(folder: Path, status: str | None) -> str | None:
    """Why a manifest still says `running`; null where it does not."""
    if status != "running":
        return None
    return RUNNING if is_claimed(folder) else KILLED


def part_gap(name: str, numbers: Iterable[tuple[int, int]]) -> str | None:
    """Which parts of a table are missing; null where none is.

    Args:
        name: of the table.
        numbers: of each part file, in order, its number and how many it stands for.
    """
    expected, missing = 0, 0
    for number, count in numbers:
        missing += max(number - expected, 0)
        expected = number + count
    if not missing:
        return None
    return f"{missing} part file{'s' * (missing != 1)} of the {name} table {'are' if missing != 1 else 'is'} missing"
