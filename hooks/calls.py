"""Marks the calls of modules, where Python looks a call up: at `__call__` of a module's class.

A hook registered on a module sends each of its calls through torch's slow path, which costs several
times what the hook does: on a decode bound by launching, most of what tracing costs. While marks
are on, a marked module is therefore of a subclass of its class, of the same name, whose `__call__`
marks and calls on. Other modules, other models and the class itself stay as they are. Nothing is
stored in a module: copies and pickles are of the class itself. Inside what torch compiles the
marks are not there: a compiled region is one piece.
"""

import abc
import copyreg
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from .clocks import HostTape, Tape

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Any], None]
Call = Callable[..., Any]


@dataclass(frozen=True)
class MarkedCall:
    """A module to mark with a code at its beginning, and the next one at its end.

    `before` is told of its arguments before the first mark, `after` of its result after the
    last; both also while marks are off. `method` is what is marked; of something that is no module
    several may be.
    """

    module: Any
    code: int
    before: Before | None = None
    after: After | None = None
    method: str = "__call__"

    @property
    def told(self) -> bool:
        """Whether something is told of its calls."""
        return self.before is not None or self.after is not None


def _host_call(original: Call, codes: dict[int, int], tape: HostTape) -> Call:
    """`__call__` that marks host time, with as little between as Python allows."""
    is_compiling, now = torch.compiler.is_dynamo_compiling, perf_counter_ns

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        code = codes.get(id(self))
        if code is None:  # made of this class while it stood in, or not marked any more
            return original(self, *args, **kwargs)
        append = tape.append
        append(code)
        append(now())
        result = original(self, *args, **kwargs)
        append(code + 1)  # not where the call raised: what has no end failed
        append(now())
        return result

    return call


def _host_module_call(codes: dict[int, int], tape: HostTape) -> Call:
    """The same in place of `nn.Module`'s own `__call__`, a frame of torch's that does nothing but choose.

    What marks then stands where that frame stood: a third of what a mark costs.
    """
    is_compiling, now, original = torch.compiler.is_dynamo_compiling, perf_counter_ns, _OWN_CALL
    assert original is not None

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        code = codes.get(id(self))
        if code is None:
            return original(self, *args, **kwargs)
        append = tape.append
        append(code)
        append(now())
        if self._compiled_call_impl is None:
            result = self._call_impl(*args, **kwargs)
        else:
            result = self._compiled_call_impl(*args, **kwargs)
        append(code + 1)
        append(now())
        return result

    return call


# Torch's own `__call__`, which `_host_module_call` stands in for; not what a program has put in its place since.
_OWN_CALL = getattr(nn.Module, "_wrapped_call_impl", None) if hasattr(nn.Module, "_call_impl") else None


def _tape_call(original: Call, codes: dict[int, int], tape: Tape) -> Call:
    """`__call__` that marks on any tape."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        code = codes.get(id(self))
        if code is None:
            return original(self, *args, **kwargs)
        tape.mark(code)
        result = original(self, *args, **kwargs)
        tape.mark(code + 1)
        return result

    return call


def _telling_call(original: Call, codes: dict[int, int], told: MarkedCall) -> Call:
    """`__call__` of one module that tells of its calls around what `original` does."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or id(self) not in codes:
            return original(self, *args, **kwargs)
        if told.before is not None:
            told.before(args, kwargs)
        result = original(self, *args, **kwargs)
        if told.after is not None:
            told.after(result)
        return result

    return call


def _stand_in(cls: type, own: Any, methods: dict[str, Call]) -> type:
    """A subclass of `cls` that stands in for a module's own class; copies and pickles are of that one."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = own.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, args, *rest = reduced
        args = tuple(own if arg is type(self) else arg for arg in args)
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            function, args = copyreg._reconstructor, (own, object, None)  # type: ignore[attr-defined]
        return function, args, *rest

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    body = names | methods | {"__reduce_ex__": reduce}
    return _subclass(cls, own.__name__, body)


def _subclass(cls: type, name: str, body: dict[str, Any]) -> type:
    """A subclass of which neither the class nor a metaclass of its own is told: it is none that a program made."""
    kind = type(cls)
    make = kind if kind in (type, abc.ABCMeta) else partial(type.__new__, kind)
    if not hasattr(cls.__init_subclass__, "__func__"):  # Python's own, which does nothing
        made: type = make(name, (cls,), body)
        return made
    made = make(name, (nn.Module,), body)
    made.__bases__ = (cls,)
    return made


# What each class stood in for that stands in no more. Another trace of the same module may have begun on top of it.
_past: "weakref.WeakKeyDictionary[type, type]" = weakref.WeakKeyDictionary()


class CallMarks:
    """Marks the calls of some modules of one trace, between `on` and `off`; `close` lets go of them.

    Each module has a class while marks are on, one while they are off, and its own. Where something
    else has changed its class since, that stays: ours below it then passes calls on.
    """

    def __init__(self, calls: Iterable[MarkedCall], tape: Tape) -> None:
        self._calls = tuple(calls)
        self._tape = tape
        self._codes: dict[str, dict[int, int]] = {call.method: {} for call in self._calls}
        self._classes: list[tuple[Any, type, type, type]] = []

    def _open(self) -> None:
        """Make the classes: of what the modules are now, for another trace may have ended before this one begins."""
        marking: dict[tuple[type, tuple[str, ...]], type] = {}
        of_object: dict[int, list[MarkedCall]] = {}
        for call in self._calls:
            of_object.setdefault(id(call.module), []).append(call)
            self._codes[call.method][id(call.module)] = call.code
        for calls in of_object.values():
            module, methods = calls[0].module, tuple(call.method for call in calls)
            own = off = type(module)
            if (own, methods) not in marking:
                marking[own, methods] = _stand_in(own, own, {name: self._marking(own, name) for name in methods})
            on = marking[own, methods]
            for call in (call for call in calls if call.told):
                codes = self._codes[call.method]
                on, off = (
                    _stand_in(cls, own, {call.method: _telling_call(getattr(cls, call.method), codes, call)})
                    for cls in (on, off)
                )
            self._classes.append((module, on, off, own))

    def _marking(self, own: type, method: str) -> Call:
        original, codes = getattr(own, method), self._codes[method]
        if isinstance(self._tape, HostTape):
            if original is _OWN_CALL:
                return _host_module_call(codes, self._tape)
            return _host_call(original, codes, self._tape)
        return _tape_call(original, codes, self._tape)

    def on(self) -> None:
        """Mark from now on."""
        if not self._classes:
            self._open()
        for module, on, off, own in self._classes:
            if type(module) in (off, own):
                _set_class(module, on)

    def off(self) -> None:
        """Mark no more, until `on`; what is told of calls is told of them still."""
        for module, on, off, _ in self._classes:
            if type(module) is on:
                _set_class(module, off)

    def close(self) -> None:
        """Leave every module as it was."""
        classes, self._classes = self._classes, []
        for codes in self._codes.values():
            codes.clear()
        for module, on, off, own in classes:
            while own in _past:
                own = _past[own]
            _past.update((cls, own) for cls in (on, off) if cls is not own)
            if type(module) in (on, off):
                _set_class(module, own)


def _set_class(module: Any, cls: type) -> None:
    """Change an instance's class, past what modules do with their attributes."""
    object.__setattr__(module, "__class__", cls)
