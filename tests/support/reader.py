"""Reads damaged traces in a process of its own, which may hang, grow or die there; and says which of them."""

import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

MAX_SECONDS = 10
MAX_RSS_BYTES = 10**9


class Reader:
    """Runs commands on traces in a child; `largest_rss_bytes` is what it took at most, torch never being loaded."""

    def __init__(self) -> None:
        self.largest_rss_bytes = 0
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._mine, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, os.getcwd()), daemon=True)
        self._process.start()
        other.close()
        self._mine.recv()

    def fault_of(self, command: str, folder: Path, out: Path) -> str | None:
        """As `hostile.fault_of`, and also for a hang, a crash, or more memory than a reader may take."""
        self._mine.send((command, folder, out))
        try:
            if not self._mine.poll(MAX_SECONDS):
                self._end()
                return f"it takes more than {MAX_SECONDS} s"
            fault, rss = self._mine.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self._begin()
            return f"its process ends with {code}"
        self.largest_rss_bytes = max(self.largest_rss_bytes, rss)
        if rss > MAX_RSS_BYTES:
            self._end()
            return f"it takes {rss:,} bytes of memory"
        return fault

    def _end(self) -> None:
        self.close()
        self._begin()

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.join()
        self._mine.close()


@contextmanager
def reader() -> Iterator[Reader]:
    """A reader that ends with the block."""
    found = Reader()
    try:
        yield found
    finally:
        found.close()


def _serve(pipe: Connection, folder: str) -> None:
    os.chdir(folder)
    import hostile

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    os.dup2(sys.stderr.fileno(), 2)
    pipe.send("ready")
    while True:
        fault = hostile.fault_of(*pipe.recv())
        pipe.send((fault, _peak_rss_bytes()))


def _peak_rss_bytes() -> int:
    """The most that this process ever held; getrusage would also tell of the one that it was forked from."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
