"""Attaches marks to a model's modules and takes them off again; nobody else registers hooks."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .clocks import Tape
from .recorder import FIRST_MODULE_SLOT, Recorder, begins, ends
from .stages import Lifecycle, Place

DETAILS = ("layer", "block", "module")


@dataclass(frozen=True)
class Slot:
    """One module that is marked, or one seam of the loop (`module` is None)."""

    module: str | None
    class_name: str | None
    place: Place
    device: str | None


LOOP_SLOTS = tuple(
    Slot(None, None, Place(stage, None, part), None)
    for stage, part in (
        ("step", None),
        ("forward", None),
        ("sample", "logits"),
        ("sample", "stop_check"),
        ("sample", "streamer"),
        ("nested", None),
    )
)


class Inert:
    """What a mark becomes in a copy or a pickle of the model: it does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class Mark:
    """A hook that stores its code and the time; safe to copy and to pickle with its module."""

    __slots__ = ("code", "tape")

    def __init__(self, tape: Tape, code: int) -> None:
        self.tape = tape
        self.code = code

    def __call__(self, *_: Any) -> None:
        """Mark the present time; what torch passes to hooks is of no interest."""
        self.tape.mark(self.code)

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()


class RootHooks:
    """The hooks on the model itself: they note what the forward was given and what the cache holds."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.recorder = recorder
        self.names = [name for name in inspect.signature(model.forward).parameters if name != "self"]
        self.open = threading.local()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        stack = self.open.__dict__.setdefault("stack", [])
        stack.append((arguments, self.recorder.forward_begins(arguments)))

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After the forward, also when it raised (`output` is None then)."""
        arguments, outer = self.open.stack.pop()
        self.recorder.forward_ends(arguments, output, outer)

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()


class RootHook:
    """One of the two root hooks, as an object that copies and pickles into one that does nothing."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        """Pass on."""
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()


def slots_for(model: nn.Module, lifecycle: Lifecycle, detail: str) -> list[Slot]:
    """List what is marked at a detail level: the loop's seams, then the modules."""
    slots = list(LOOP_SLOTS)
    for name, module in model.named_modules():
        place = lifecycle.places.get(name)
        if place is None or not _has_forward(module) or not _wanted(name, place, lifecycle, detail):
            continue
        slots.append(Slot(name, type(module).__name__, place, device_of(module)))
    return slots


def _wanted(name: str, place: Place, lifecycle: Lifecycle, detail: str) -> bool:
    if detail == "module":
        return True
    parent = name.rpartition(".")[0]
    if parent not in lifecycle.places:
        return True  # a layer, or what stands beside the chain
    return detail == "block" and place.part is not None and parent in lifecycle.layers


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


def device_of(module: nn.Module) -> str | None:
    """Where a module's work runs: what accelerate says, else where its first parameter lies."""
    hook = getattr(module, "_hf_hook", None)
    execution_device = getattr(hook, "execution_device", None)
    if execution_device is not None:
        return f"cuda:{execution_device}" if isinstance(execution_device, int) else str(execution_device)
    parameter = next(module.parameters(), None)
    return str(parameter.device) if parameter is not None else None


@contextmanager
def on_calls(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call `enter(module, args, kwargs)` and `leave(module, args, kwargs, output)` for every module but the root."""
    handles: list[RemovableHandle] = []
    try:
        for module in model.modules():
            if module is not model:
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Attachment:
    """The hooks of one trace on one model. `pause` and `resume` take off and put back the modules' own."""

    def __init__(self, model: nn.Module, slots: list[Slot], recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self._modules = dict(model.named_modules())
        self._slots = slots
        self._root_handles: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put on all hooks."""
        hooks = RootHooks(self.model, self.recorder)
        self._root_handles = [
            self.model.register_forward_pre_hook(RootHook(hooks.begin), prepend=True, with_kwargs=True),
            self.model.register_forward_hook(RootHook(hooks.end), with_kwargs=True, always_call=True),
        ]
        self.resume()

    def resume(self) -> None:
        """Put on the modules' hooks, unless they are on."""
        if self._handles:
            return
        tape = self.recorder.tape
        for number, slot in enumerate(self._slots[FIRST_MODULE_SLOT:], FIRST_MODULE_SLOT):
            assert slot.module is not None
            module = self._modules[slot.module]
            self._handles += [
                module.register_forward_pre_hook(Mark(tape, begins(number)), prepend=True),
                module.register_forward_hook(Mark(tape, ends(number))),
            ]

    def pause(self) -> None:
        """Take off the modules' hooks; the model's own stay, so that steps are still seen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def toggle(self, on: bool) -> None:
        """Put the modules' hooks on or off between two steps; cheap where nothing changes."""
        if on:
            self.resume()
        else:
            self.pause()

    def detach(self) -> None:
        """Take off all hooks."""
        self.pause()
        for handle in self._root_handles:
            handle.remove()
        self._root_handles = []
