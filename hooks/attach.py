"""Attaches marks to a model's modules and takes them off again; nobody else registers hooks."""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .calls import CallMarks, MarkedCall
from .inventory import expert_bytes
from .offload import releases, weight_loader
from .recorder import FIRST_MODULE_SLOT, Recorder, begins
from .stages import Lifecycle, Place

DETAILS = ("layer", "block", "module")
# Parts that come between the work of others, at every level of detail: shown beside the part that they are in.
LOADING, RELEASING, COMMUNICATING = "weights", "release", "communication"
# What of a module's loader they are.
LOADER_METHODS = {LOADING: "pre_forward", RELEASING: "post_forward"}
# Where torch keeps the hooks of a module's forward.
HOOK_DICTS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


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
        ("other", COMMUNICATING),
    )
)


# What a hook becomes in a copy or a pickle of the model: a function of Python's own that takes anything and does
# nothing, so that a model that was saved while it was traced loads where there is no lifetrace.
INERT = (getattr, (nullcontext(), "__exit__"))


class RootHooks:
    """The hooks on the model itself: they note what the forward was given and what the cache holds."""

    def __init__(self, model: nn.Module, recorder: Recorder, number: int = 0) -> None:
        self.recorder = recorder
        self.number = number
        self.names = [name for name in inspect.signature(model.forward).parameters if name != "self"]
        self.open = threading.local()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        stack = self.open.__dict__.setdefault("stack", [])
        stack.append((arguments, self.recorder.forward_begins(arguments, self.number)))

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After the forward, also when it raised (`output` is None then)."""
        stack = self.open.__dict__.get("stack")
        if stack:  # an interrupt, or another thread's trace, may have come between
            arguments, outer = stack.pop()
            self.recorder.forward_ends(arguments, output, outer)

    def __reduce__(self) -> tuple[Any, ...]:
        return INERT


class HandCalls:
    """Told of the calls of embedding, first layer and head: they see a program that calls the stages by itself."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def embedding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the embedding: outside of a forward, a step begins here."""
        if self.recorder.by_hand() and args and isinstance(args[0], torch.Tensor):
            self.recorder.hand_begins(args[0])

    def first_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first layer, whose arguments hold the cache."""
        if self.recorder.by_hand():
            self.recorder.hand_cache(kwargs)

    def head(self, output: Any) -> None:
        """After the head."""
        if self.recorder.by_hand():
            self.recorder.hand_ends(reached_head=True)


class ExpertHook:
    """Before stacked experts: keeps the router's choice, the first tensor of whole numbers that they are given."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the choice; nothing is computed from it now."""
        tensors = (given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor))
        choice = next((t for t in tensors if t.dtype in (torch.int64, torch.int32)), None)
        if choice is not None:
            self.recorder.experts_chosen(self.name, choice)

    def __reduce__(self) -> tuple[Any, ...]:
        return INERT


class RootHook:
    """One of the two root hooks, as an object that copies and pickles into one that does nothing."""

    def __init__(self, call: Any) -> None:
        self.call = call

    @torch.compiler.disable  # generate may compile the model by itself: what we do must not go into its graphs
    def __call__(self, *args: Any) -> None:
        """Pass on."""
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return INERT


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled code, by `module.compile()` or a compiled forward."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(
        module.forward, "_torchdynamo_orig_callable"
    )


def compiled_regions(model: nn.Module) -> list[str]:
    """Names of the outermost compiled modules; what lies inside them runs as one piece."""
    found: list[str] = []
    for name, module in model.named_modules():
        if is_compiled(module) and not any(_inside(name, outer) for outer in found):
            found.append(name)
    return found


def _inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(f"{outer}.")


def slots_for(model: nn.Module, lifecycle: Lifecycle, detail: str) -> list[Slot]:
    """List what is marked at a detail level: the loop's seams, then the modules."""
    slots = list(LOOP_SLOTS)
    hidden = compiled_regions(model)
    for name, module in model.named_modules():
        place = lifecycle.places.get(name)
        if any(name != region and _inside(name, region) for region in hidden):
            continue
        loader = weight_loader(module)
        if loader is not None:
            parts = LOADER_METHODS if releases(loader) else (LOADING,)
            slots += [Slot(name, type(loader).__name__, Place("other", part=p), device_of(module)) for p in parts]
        if place is None or not _has_forward(module) or not _wanted(name, place, lifecycle, detail):
            continue
        slots.append(Slot(name, type(module).__name__, place, device_of(module)))
    return slots


def _wanted(name: str, place: Place, lifecycle: Lifecycle, detail: str) -> bool:
    if detail == "module":
        return True
    parent = name.rpartition(".")[0]
    while parent and parent not in lifecycle.places:  # a list, or a module of the chain
        parent = parent.rpartition(".")[0]
    if not parent:
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


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Set aside every hook on the model's modules: a forward of our own is not what they were put there to see."""
    kept = [(module, {name: vars(module)[name] for name in HOOK_DICTS}) for module in model.modules()]
    for module, _ in kept:
        vars(module).update({name: OrderedDict() for name in HOOK_DICTS})
    try:
        yield
    finally:
        for module, hooks in kept:
            vars(module).update(hooks)


class Attachment:
    """What sees one trace's model. `toggle` switches the marks of its modules between two steps."""

    def __init__(
        self,
        model: nn.Module,
        slots: list[Slot],
        recorder: Recorder,
        lifecycle: Lifecycle | None = None,
        number: int = 0,
    ) -> None:
        self.model = model
        self.recorder = recorder
        self.number = number
        self._modules = dict(model.named_modules())
        self._expert_modules = tuple(expert_bytes(model)) if lifecycle is not None else ()
        self._marks = CallMarks(self._marked(slots, lifecycle), recorder.tape)
        self._is_on = False
        self._handles: list[RemovableHandle] = []

    def _marked(self, slots: list[Slot], lifecycle: Lifecycle | None) -> Iterator[MarkedCall]:
        """The module slots; those that a program may call by hand also tell the recorder of it."""
        hand, before, after = HandCalls(self.recorder), {}, {}
        if lifecycle is not None:
            before = {lifecycle.layers[0]: hand.first_layer, lifecycle.embed: hand.embedding}
            after = {lifecycle.head: hand.head}
        for number, slot in enumerate(slots[FIRST_MODULE_SLOT:], FIRST_MODULE_SLOT):
            assert slot.module is not None
            module = self._modules[slot.module]
            if slot.place.part in LOADER_METHODS:
                yield MarkedCall(weight_loader(module), begins(number), method=LOADER_METHODS[slot.place.part])
            else:
                yield MarkedCall(module, begins(number), before.get(slot.module), after.get(slot.module))

    def attach(self) -> None:
        """Put everything on."""
        hooks = RootHooks(self.model, self.recorder, self.number)
        self._handles = [
            self.model.register_forward_pre_hook(RootHook(hooks.begin), prepend=True, with_kwargs=True),
            self.model.register_forward_hook(RootHook(hooks.end), with_kwargs=True, always_call=True),
        ]
        for name in self._expert_modules:
            expert_hook = ExpertHook(self.recorder, name)
            self._handles.append(self._modules[name].register_forward_pre_hook(expert_hook, with_kwargs=True))
        self._marks.on()
        self._is_on = True

    def toggle(self, on: bool) -> None:
        """Mark the modules of the step that comes, or see only the step itself; cheap where nothing changes."""
        if on != self._is_on:
            self._is_on = on
            (self._marks.on if on else self._marks.off)()

    def detach(self) -> None:
        """Take everything off."""
        self._marks.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
