"""Runs chosen steps under torch.profiler, and says between which two marks each operator ran.

A pass of its own, never timed: the profiler costs a third and more of what it watches. At each
mark a range without length is put into the profile, so that operators fall between marks on the
profiler's own clock; on CUDA each operator brings the kernels that it launched, which torch
correlates. What has no module of its own (rotary embedding, appending to the cache) is labelled
by the functions that do it.
"""

import functools
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import cache_utils

from .clocks import Marks, Ready

MARK, LABEL = "lifetrace.mark", "lifetrace.label."
ROTARY, CACHE_APPEND = "rotary", "cache_append"


@dataclass(frozen=True)
class Operator:
    """One operator of a profiled step, after its mark number `mark`.

    `host_ns` is its own time, what it calls left out; `device_ns` that of its kernels, null on a
    CPU. `label` names the function around it, where that is one of those labelled.
    """

    mark: int
    name: str
    label: str | None
    shapes: str
    kernels: tuple[str, ...]
    host_ns: int
    device_ns: int | None


@dataclass(frozen=True)
class StepProfile:
    """The operators of one step, and how long its device lay idle between its first and last kernel."""

    operators: tuple[Operator, ...]
    idle_ns: int | None


class ProfilerTape(threading.local):
    """A tape whose marks stand in a profile of their step; `begin` starts the profile, `cut` ends it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.codes = array("q")
        self._profile: Any = None

    def begin(self) -> None:
        """Profile the step that comes, unless one is being profiled."""
        if self._profile is None:
            on_device = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_device], record_shapes=True, acc_events=True)
            self._profile.__enter__()

    def mark(self, code: int) -> None:
        """Store the code, and mark its place in the profile."""
        self.codes.append(code)
        if self._profile is not None:
            with record_function(MARK):
                pass

    def cut(self) -> Ready:
        """Hand over the marks so far with the profile, and end it."""
        codes = self.suspend()
        found = None
        if self._profile is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._profile.__exit__(None, None, None)
            found = _step_profile(self._profile.events(), self.device.type == "cuda")
            self._profile = None
        return Ready(Marks(codes, array("q", [0] * len(codes)), profile=found))

    def suspend(self) -> "array[int]":
        """Set the marks so far aside and start afresh, for a step inside a step."""
        codes, self.codes = self.codes, array("q")
        return codes

    def resume(self, suspended: "array[int]") -> None:
        """Go on with what `suspend` set aside."""
        self.codes = suspended


def _step_profile(events: Any, on_cuda: bool) -> StepProfile:
    host = [event for event in events if event.device_type == DeviceType.CPU]
    host.sort(key=lambda event: event.time_range.start)
    operators, mark = [], -1
    for event in host:
        if event.name == MARK:
            mark += 1
        elif mark >= 0 and "::" in event.name:
            operators.append(_operator(event, mark, on_cuda))
    return StepProfile(tuple(operators), _idle_ns(events) if on_cuda else None)


def _operator(event: Any, mark: int, on_cuda: bool) -> Operator:
    kernels = tuple(kernel.name for kernel in event.kernels)
    return Operator(
        mark=mark,
        name=event.name,
        label=_label(event),
        shapes=str([shape for shape in event.input_shapes or [] if shape]),
        kernels=kernels,
        host_ns=round(event.self_cpu_time_total * 1000),
        device_ns=round(sum(kernel.duration for kernel in event.kernels) * 1000) if on_cuda else None,
    )


def _label(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(LABEL):
            return str(event.name.removeprefix(LABEL))
        event = event.cpu_parent
    return None


def _idle_ns(events: Any) -> int | None:
    """Between the first kernel's start and the last one's end, the time that no kernel covers.

    Our labels stand on the device's timeline too, around their kernels and what lies between these.
    """
    kernels = (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    if not spans:
        return None
    idle, reached = 0.0, spans[0][0]
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return round(idle * 1000)


# -- labels ------------------------------------------------------------------------------------


@contextmanager
def labels(model: nn.Module) -> Iterator[None]:
    """Label rotary embedding and cache appends in the profile, while the block runs."""
    before = []
    try:
        for home, name, label in _labelled(model):
            function = vars(home)[name]
            before.append((home, name, function))
            setattr(home, name, _with_label(function, label))
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)


def _labelled(model: nn.Module) -> Iterator[tuple[Any, str, str]]:
    """The functions to label, each by what holds it and its name."""
    for module in {type(module).__module__: None for module in model.modules()}:
        home = sys.modules.get(module)  # a class may come from a module that nobody imports
        for name in [
            name for name in vars(home or object) if name.startswith("apply_") and ("rotary" in name or "rope" in name)
        ]:
            yield home, name, ROTARY
    for cache in vars(cache_utils).values():
        if isinstance(cache, type) and issubclass(cache, cache_utils.Cache) and "update" in vars(cache):
            yield cache, "update", CACHE_APPEND


def _with_label(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with record_function(LABEL + label):
            return function(*args, **kwargs)

    return labelled
