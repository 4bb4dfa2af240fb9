"""Writing a file so that a reader never sees half of it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lifetrace.errors import TraceError


@contextmanager
def replacing(path: Path, what: str) -> Iterator[BinaryIO]:
    """Open a file beside the path for writing, and move it into its place when the block has ended well.

    Args:
        path: where the file shall lie; a link there is followed.
        what: names the file in errors, such as `report`.

    Raises:
        TraceError: something else than a file lies there, or it cannot be written.
    """
    place = path.resolve() if path.is_symlink() else path
    if place.exists() and not place.is_file():
        raise TraceError(f"{place} is no ordinary file; give -o the name of a file to write.")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        cause = error.strerror or error
        raise TraceError(f"The {what} {place} cannot be written: {cause}. Choose another place with -o.") from None


def place_in(folder: Path, name: str) -> Path:
    """Where a file is written into a trace.

    Raises:
        TraceError: a link lies there, which would lead out of the folder of whoever made the trace.
    """
    place = folder / name
    if place.is_symlink():
        raise TraceError(f"{place} is a link, which is not followed; give -o the name of a file to write.")
    return place


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
