"""Tapes: what a hook writes on. A mark is a code and a time; everything else is derived later.

A tape is local to a thread, so two generates at once on one model do not mix. The host tape
stores host time. The CUDA tape stores a CUDA event beside it, recorded on the stream that runs
the work, taken from a pool, and read only after the step has finished: no mark ever waits.
"""

import threading
from array import array
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol


@dataclass(frozen=True)
class Marks:
    """The marks of one step in the order they were made.

    `codes[i]` says which slot began (even) or ended (odd); `times_ns[i]` when, on the host.
    `device_ns[i]` is device time since the step's first mark on the same device, None where no event was recorded;
    `devices[i]` says on which. Both are None where the device has no clock of its own.
    `starved[i]` says that the device had already done all work up to the mark before, asked without
    waiting for it; None for the first mark of a step on a device, and where no event was recorded.
    `memory[i]` is what is allocated at the mark and the peak since the mark before, on a tape
    that measures memory in place of time; `profile` holds the step's operators, on one that profiles.
    """

    codes: "array[int]"
    times_ns: "array[int]"
    device_ns: list[int | None] | None = None
    devices: list[Any] | None = None
    starved: list[bool | None] | None = None
    memory: list[tuple[int, int]] | None = None
    profile: Any = None


class Tape(Protocol):
    """Where hooks leave their marks; one a thread, cut into steps by the recorder."""

    def mark(self, code: int) -> None:
        """Store the code with the present time."""

    def cut(self) -> "Pending":
        """Hand over the marks so far and start afresh."""

    def suspend(self) -> Any:
        """Set the marks so far aside and start afresh, for a step inside a step."""

    def resume(self, suspended: Any) -> None:
        """Go on with what `suspend` set aside."""


class Pending(Protocol):
    """Marks of a step whose device times may still be on their way."""

    def read(self, wait: bool) -> Marks | None:
        """Return the marks, or None when the device has not reached the last one and `wait` is off."""


@dataclass(frozen=True)
class Ready:
    """Marks that are complete."""

    marks: Marks

    def read(self, wait: bool) -> Marks:
        """Return the marks."""
        return self.marks


@dataclass(frozen=True, slots=True)
class HostPending:
    """Host marks, codes and times in turn: complete as soon as they are made."""

    marks: "array[int]"

    def read(self, wait: bool) -> Marks:
        """Return the marks."""
        return Marks(self.marks[0::2], self.marks[1::2])


class HostTape(threading.local):
    """A tape that stores host time alone, for devices that work in step with the host.

    Codes and times follow each other in one array; `append` is that of the array now written to,
    so that a marked call needs to look up nothing else.
    """

    def __init__(self) -> None:
        self._begin(array("q"))

    def _begin(self, marks: "array[int]") -> None:
        self._marks = marks
        self.append = marks.append

    def mark(self, code: int) -> None:
        """Store the code with the present time."""
        append = self.append
        append(code)
        append(perf_counter_ns())

    def cut(self) -> HostPending:
        """Hand over the marks so far and start afresh."""
        return HostPending(self.suspend())

    def suspend(self) -> "array[int]":
        """Set the marks so far aside and start afresh, for a step inside a step."""
        suspended = self._marks
        self._begin(array("q"))
        return suspended

    def resume(self, suspended: "array[int]") -> None:
        """Go on with what `suspend` set aside."""
        self._begin(suspended)


class Event(Protocol):
    """The part of `torch.cuda.Event` that a tape needs."""

    def record(self, stream: Any) -> None:
        """Note the moment when the stream's work so far is done."""

    def query(self) -> bool:
        """Whether that moment has passed."""

    def synchronize(self) -> None:
        """Wait for it."""

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds from this to `later`."""


class EventDevice(Protocol):
    """Makes events and knows each device's current stream; torch.cuda, or a simulation in tests."""

    def event(self) -> Event:
        """A new timing event."""

    def current_stream(self, device: Any) -> Any:
        """The stream on which this thread launches work for the device."""


class TorchCuda:
    """The real device."""

    def event(self) -> Event:
        """A new timing event."""
        import torch

        event: Event = torch.cuda.Event(enable_timing=True)
        return event

    def current_stream(self, device: Any) -> Any:
        """The stream on which this thread launches work for the device."""
        import torch

        return torch.cuda.current_stream(device)


@dataclass
class CudaPending:
    """Marks whose events the device may not have reached yet."""

    codes: "array[int]"
    times_ns: "array[int]"
    events: list[Event | None]
    devices: list[Any]
    starved: list[bool | None]
    pool: list[Event] = field(repr=False)

    def read(self, wait: bool) -> Marks | None:
        """Return the marks with device times, and give the events back to the pool."""
        last = self._last_by_device().values()
        if wait:
            for event in last:
                event.synchronize()
        elif not all(event.query() for event in last):
            return None
        marks = Marks(self.codes, self.times_ns, self._device_times(), self.devices, self.starved)
        self.pool.extend(event for event in self.events if event is not None)
        return marks

    def _last_by_device(self) -> dict[Any, Event]:
        pairs = zip(self.devices, self.events, strict=True)
        return {device: event for device, event in pairs if event is not None}

    def _device_times(self) -> list[int | None]:
        """Nanoseconds from the first event of the same device: events of two devices never meet."""
        origins: dict[Any, Event] = {}
        times: list[int | None] = []
        for device, event in zip(self.devices, self.events, strict=True):
            if event is None:
                times.append(None)
                continue
            origin = origins.setdefault(device, event)
            times.append(0 if origin is event else round(origin.elapsed_time(event) * 1e6))
        return times


class CudaTape(threading.local):
    """A tape that records a pooled CUDA event at each mark, beside the host time.

    `device_of[code]` is the device whose stream does the work that the mark bounds, or None for
    a mark between pieces of host work.
    """

    def __init__(self, device_of: list[Any], cuda: EventDevice) -> None:
        self.device_of = device_of
        self.cuda = cuda
        self.pool: list[Event] = []
        self._start()

    def _start(self) -> None:
        self.codes = array("q")
        self.times_ns = array("q")
        self.events: list[Event | None] = []
        self.devices: list[Any] = []
        self.starved: list[bool | None] = []
        self._last: dict[Any, Event] = {}

    def mark(self, code: int) -> None:
        """Store the code with the present time, and record an event on the stream of its device."""
        device = self.device_of[code]
        self.codes.append(code)
        self.times_ns.append(perf_counter_ns())
        self.devices.append(device)
        if device is None:
            self.events.append(None)
            self.starved.append(None)
            return
        last = self._last.get(device)
        self.starved.append(last.query() if last is not None else None)
        event = self.pool.pop() if self.pool else self.cuda.event()
        event.record(self.cuda.current_stream(device))
        self.events.append(event)
        self._last[device] = event

    def cut(self) -> CudaPending:
        """Hand over the marks so far and start afresh."""
        pending = CudaPending(self.codes, self.times_ns, self.events, self.devices, self.starved, self.pool)
        self._start()
        return pending

    def suspend(self) -> tuple[Any, ...]:
        """Set the marks so far aside and start afresh, for a step inside a step."""
        suspended = (self.codes, self.times_ns, self.events, self.devices, self.starved, self._last)
        self._start()
        return suspended

    def resume(self, suspended: tuple[Any, ...]) -> None:
        """Go on with what `suspend` set aside."""
        self.codes, self.times_ns, self.events, self.devices, self.starved, self._last = suspended
