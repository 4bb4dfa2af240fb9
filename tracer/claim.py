"""The one writer of a trace folder: two at once would mix their files.

The claim is a lock that the system holds on an open file, so that it ends with its process however
that ends, and a dead writer blocks nobody. Where a file system has no locks (some network ones),
the file's being there is the claim, and the message says what to do after a crash.
"""

import fcntl
import os
from pathlib import Path

from lifetrace.analysis.gaps import CLAIM, NO_LOCKS
from lifetrace.errors import TraceError


class Claim:
    """Keeps others from writing into a folder until it is released or this process ends."""

    def __init__(self, folder: Path) -> None:
        """Claim the folder.

        Raises:
            TraceError: another process, or another trace of this one, writes there.
            OSError: the folder cannot be written.
        """
        self._file = folder / CLAIM
        self._pid = os.getpid()
        found = self._file.exists()
        self._handle: int | None = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_there():  # its last owner has removed it between the two lines above
                raise BlockingIOError
        except BlockingIOError:
            self._close()
            raise TraceError(f"Another run is writing into {folder}; choose another folder with --out.") from None
        except OSError as error:
            self._close()
            if error.errno not in NO_LOCKS:
                raise
            if found:
                raise TraceError(
                    f"Another run is writing into {folder}, or was killed there; choose another folder with --out, "
                    f"or remove {self._file} if none is running."
                ) from None

    def release(self) -> None:
        """Let others write; a process that was forked from the owner lets go of nothing."""
        if self._pid == os.getpid():
            self._file.unlink(missing_ok=True)
        self._close()

    def _is_there(self) -> bool:
        assert self._handle is not None
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self._file, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
