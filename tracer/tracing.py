"""`lifetrace.trace`: what a user's own code puts around a generate."""

import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lifetrace.analysis.trace import Trace, read_trace
from lifetrace.errors import LifetraceError, UsageError

from . import session as sessions
from .post_mortem import post_mortem
from .session import Options, Session, default_folder, generating_model, status_of


class trace:
    """Trace every generate of a model inside a `with` block.

    Example::

        with lifetrace.trace(model, tokenizer=tokenizer) as trace:
            model.generate(**inputs, max_new_tokens=32)
        trace.steps  # a pandas DataFrame

    Args:
        model: a causal language model of transformers, or a wrapper around one.
        out: the folder to write; by default `traces/<time>-<model>`.
        tokenizer: gives the tokens their text; without one `tokens.text` is null.
        detail: `layer`, `block` or `module`.
        every: record spans and KV of each Nth step of a call.
        steps: (first, last) of the steps of a call whose spans are recorded, last excluded.
        force: replace an older trace in `out`.
        strict: raise a fault inside lifetrace when the block has ended, in place of a warning.

    Raises:
        ModelError: the model is not one that lifetrace traces, or is being traced already.
        TraceError: the folder cannot be written or is not empty.
        UsageError: a setting that cannot be.
        RunError: after the block, with `strict`: lifetrace itself failed.

    The block's own exception goes on unchanged; the trace then has status `failed`,
    `interrupted` or `oom`. A fault inside lifetrace ends the recording and not the block; the
    trace then is `failed`, with what was recorded before. After the block the object has `steps`,
    `spans`, `kv`, `tokens`, `modules`, `products`, `meta` and `path`, as `lifetrace.read_trace` gives them.
    """

    def __init__(
        self,
        model: Any,
        out: str | Path | None = None,
        tokenizer: Any = None,
        *,
        detail: str = "block",
        every: int = 1,
        steps: tuple[int, int | None] = (0, None),
        force: bool = False,
        strict: bool = False,
    ) -> None:
        options = Options.of(detail, every, steps)
        if tokenizer is not None and not hasattr(tokenizer, "batch_decode"):
            raise UsageError(f"tokenizer={tokenizer!r:.60} is none; give what AutoTokenizer.from_pretrained returns.")
        path = Path(out) if out is not None else default_folder(generating_model(model))
        self._session: Session | None = Session(model, path, options, tokenizer, force=force)
        self.path = self._session.path
        self._session.on_out_of_memory = post_mortem
        self._strict = strict
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        assert self._session is not None, "a trace is of one block; begin another for the next"
        self._outer = sessions.automatic.get(id(self._session.model))
        if self._outer is not None:
            self._outer.detach()
        try:
            self._session.start()
        except BaseException:
            self._resume_outer()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        assert session is not None
        try:
            session.finish(status_of(error), error)
        finally:
            self._session = None  # it holds the model
            self._resume_outer()
        for fault in session.faults:
            report(fault, error, self._strict)

    def _resume_outer(self) -> None:
        """Let the trace of the whole program go on, if there is one."""
        if self._outer is not None:
            self._outer.attach()
            self._outer = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stored(), name)

    def __repr__(self) -> str:
        return repr(self._stored()) if self._session is None else f"<trace of {self.path}, recording>"

    def _repr_html_(self) -> str:
        return self._stored()._repr_html_()

    def _stored(self) -> Trace:
        """What was written: remembered once the block has ended, read anew while it goes."""
        if self._trace is None:
            trace = read_trace(self.path)
            if self._session is not None:
                return trace
            self._trace = trace
        return self._trace


def report(fault: LifetraceError, error: BaseException | None, strict: bool) -> None:
    """Tell of a fault of ours when a block has ended: as a warning, or where asked for as an exception.

    The block's own exception keeps its place, also where the program turns warnings into errors.
    """
    if strict and error is None:
        raise fault
    try:
        warnings.warn(f"lifetrace: {fault}", stacklevel=3)
    except Warning:
        if error is None:
            raise
        print(f"lifetrace: {fault}", file=sys.stderr)
