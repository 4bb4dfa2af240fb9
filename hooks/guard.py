"""What becomes of a fault of our own inside the user's program: the recording ends there, the program goes on."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Recording(Protocol):
    """Something that records until a fault of its own; null while there is none."""

    fault: Exception | None


Owner = TypeVar("Owner", bound=Recording)
P = ParamSpec("P")
R = TypeVar("R")


def guarded(work: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], Any]:
    """Keep a fault of ours from the program: the first is remembered, and from then on nothing is done.

    Returns null where nothing was done. What is no `Exception`, an interrupt above all, goes on: it is the program's.
    """

    @functools.wraps(work)
    def safe(recording: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        if recording.fault is not None:
            return None
        try:
            return work(recording, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is ours, and the program is not
            recording.fault = recording.fault or error
            return None

    return safe
