"""Traces every generate of every causal language model in a block, a function or a whole program.

Nothing is imported before the program does it: a program may set environment variables that torch
and transformers read when they load. Until transformers' `generate` exists, its import is awaited.
"""

import functools
import gc
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from lifetrace.errors import LifetraceError, RunError

if TYPE_CHECKING:
    from .analysis.trace import Trace
    from .hooks.recorder import Recorder
    from .session import Session

GENERATION = "transformers.generation.utils"


@dataclass(frozen=True)
class Recording:
    """How the models of a program are traced; each in a folder of its own, the first in `out`."""

    out: Path | None = None
    detail: str = "block"
    every: int = 1
    steps: tuple[int, int | None] = (0, None)
    force: bool = False


class trace_all(ContextDecorator):
    """Trace every generate of every causal language model inside a `with` block or a function.

    Example::

        with lifetrace.trace_all(out="traces/evening") as tracing:
            pipe("Once upon a time")  # any code that comes to generate(), in any thread
        tracing.traces[0].steps

        @lifetrace.trace_all()
        def answer(question): ...

    A model is traced from its first generate on, in a trace of its own: the first in `out` (by
    default `traces/<time>-<model>`), further ones in `out-2`, `out-3`, …; a function that is called
    again begins new ones. What cannot be traced runs untraced, and `notes` says why. Traced models
    stay in memory until the block ends. Inside, `lifetrace.trace(model)` takes its model over.

    Args:
        out, detail, every, steps, force: as of `lifetrace.trace`.
        strict: raise when the block has ended and lifetrace itself had failed; `notes` says how in any case.
    """

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        detail: str = "block",
        every: int = 1,
        steps: tuple[int, int | None] = (0, None),
        force: bool = False,
        strict: bool = False,
    ) -> None:
        self.strict = strict
        self._recording = Recording(Path(out) if out is not None else None, detail, every, steps, force)
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._begin()

    def _begin(self) -> None:
        self.notes: list[str] = []
        self.faults: list[LifetraceError] = []
        self._ended: list[tuple[Path, int]] = []
        self._sessions: list[Session] = []
        self._seen: dict[int, tuple[Any, Session | None]] = {}

    def __enter__(self) -> Self:
        self._begin()
        self._undo = when_imported(GENERATION, self._watch_generate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)
        if self.strict and error is None and self.faults:
            raise self.faults[0]

    def close(self, error: BaseException | None = None) -> None:
        """End all traces; `error` is what ended the block, if it did not end by itself."""
        self._undo()
        sessions, self._sessions = self._sessions, []
        self._seen.clear()
        for session in sessions:
            from .session import status_of

            session.end_automatic()
            session.guarded(partial(_find_tokenizer, session))
            session.finish(status_of(error), error)
            self.faults += session.faults
            self._ended.append((session.path, _generates(session)))
        self.notes += [str(fault) for fault in self.faults]

    @property
    def paths(self) -> list[Path]:
        """The folders of the traces."""
        return [path for path, _ in self._ended] + [session.path for session in self._sessions]

    @property
    def calls(self) -> int:
        """How many generates were traced, those inside others left out."""
        return sum(calls for _, calls in self._ended) + sum(map(_generates, self._sessions))

    @property
    def traces(self) -> "list[Trace]":
        """The traces, once the block has ended."""
        from .analysis.trace import read_trace

        return [read_trace(path) for path in self.paths]

    # -- generate ------------------------------------------------------------------------

    def _watch_generate(self, module: ModuleType) -> Callable[[], None]:
        mixin = module.GenerationMixin
        original = mixin.generate

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "inside", False):  # an assistant: its model's trace sees it
                return original(model, *args, **kwargs)
            self._thread.inside = True
            try:
                recorder = self._unseen(model)
                if recorder is None:
                    return original(model, *args, **kwargs)
                from .hooks.generation import _generate

                # Not the `generate` of its class: one of its own, which came here by super(), would run twice.
                return _generate(recorder, original, model, args, kwargs)
            finally:
                self._thread.inside = False

        mixin.generate = generate

        def undo() -> None:
            mixin.generate = original

        return undo

    def _unseen(self, model: Any) -> "Recorder | None":
        """What has to be told of a generate; none where its seam told of it, or its model cannot be traced.

        A model is taken in at its first generate. A method that was bound before that comes here
        without having passed the seam.
        """
        with self._lock:
            if id(model) not in self._seen:
                self._seen[id(model)] = (model, self._begin_session(model))  # kept: its id must not become another's
            _, session = self._seen[id(model)]
        if session is None or not session.attached or session.recorder.current_call() is not None:
            return None
        return session.recorder

    def _begin_session(self, model: Any) -> "Session | None":
        try:
            return self._new_session(model)
        except LifetraceError as error:
            self.notes.append(f"{type(model).__name__} is not traced: {error}")
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is ours, and the program is not
            what = f"lifetrace failed to trace {type(model).__name__}: {type(error).__name__}: {error}"
            self.faults.append(RunError(what))
        return None

    def _new_session(self, model: Any) -> "Session":
        from .post_mortem import post_mortem
        from .session import Options, Session, default_folder, generating_model

        asked = self._recording
        options = Options.of(asked.detail, asked.every, asked.steps)
        path = asked.out if asked.out is not None else default_folder(generating_model(model))
        if self._sessions and asked.out is not None:
            path = path.with_name(f"{path.name}-{len(self._sessions) + 1}")
        session = Session(model, path, options, facts={"command": self.command}, force=asked.force)
        session.on_out_of_memory = post_mortem
        session.start_automatic()
        self._sessions.append(session)
        return session

    command: str | None = None


def _generates(session: "Session") -> int:
    calls = session.recorder.calls
    return sum(call.kind == "generate" and call.parent_step is None for call in calls)


def _find_tokenizer(session: "Session") -> None:
    session.use_tokenizer(tokenizer_of(session.model))


def tokenizer_of(model: Any) -> Any:
    """The tokenizer that the program has loaded for a model: the one of its name, or the only one; else None."""
    base = sys.modules["transformers"].PreTrainedTokenizerBase
    loaded = [thing for thing in gc.get_objects() if issubclass(type(thing), base)]
    name = getattr(model.config, "name_or_path", None)
    named = [tokenizer for tokenizer in loaded if name and tokenizer.name_or_path == name]
    return (named or loaded)[0] if named or len(loaded) == 1 else None


# -- imports -----------------------------------------------------------------------------------


def when_imported(name: str, then: Callable[[ModuleType], Callable[[], None]]) -> Callable[[], None]:
    """Call `then(module)` now if the module is loaded, else right after it is; returns what undoes it."""
    if name in sys.modules:
        return then(sys.modules[name])
    finder = _AwaitImport(name, then)
    sys.meta_path.insert(0, finder)
    return finder.undo


class _AwaitImport(importlib.abc.MetaPathFinder):
    """Stands first among the finders until one module is loaded."""

    def __init__(self, name: str, then: Callable[[ModuleType], Callable[[], None]]) -> None:
        self.name = name
        self.then = then
        self._after: Callable[[], None] = lambda: None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the others find the module, and come back when it has run."""
        if fullname != self.name:
            return None
        self._leave()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self._loaded)
        return spec

    def _loaded(self, module: ModuleType) -> None:
        self._after = self.then(module)

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def undo(self) -> None:
        """Wait no longer, or undo what was done after the import."""
        self._leave()
        self._after()


class _ThenCall(importlib.abc.Loader):
    """A loader that loads as another does, and then calls."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module as its own loader does, which it then names as its loader, and call."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.then(module)
