"""`lifetrace.trace`: what a user's own code puts around a generate."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lifetrace.analysis.trace import Trace, read_trace

from . import session as sessions
from .post_mortem import post_mortem
from .session import Options, Session, default_folder, status_of


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

    Raises:
        ModelError: the model is not one that lifetrace traces, or is being traced already.
        TraceError: the folder cannot be written or is not empty.
        UsageError: a setting that cannot be.

    The block's own exception goes on unchanged; the trace then has status `failed`,
    `interrupted` or `oom`. After the block the object has `steps`, `spans`, `kv`, `tokens`,
    `modules`, `products`, `meta` and `path`, as `lifetrace.read_trace` gives them.
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
    ) -> None:
        path = Path(out) if out is not None else default_folder(model)
        options = Options(detail, every, steps[0], steps[1])
        self._session = Session(model, path, options, tokenizer, force=force)
        self._session.on_out_of_memory = post_mortem
        self._trace: Trace | None = None
        self._finished = False

    @property
    def path(self) -> Path:
        """The folder of the trace."""
        return self._session.path

    def __enter__(self) -> Self:
        self._outer = sessions.automatic.get(id(self._session.model))
        if self._outer is not None:
            self._outer.detach()
        self._session.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.finish(status_of(error), error)
        if self._outer is not None:
            self._outer.attach()
        self._finished = True
        for fault in self._session.faults:
            import warnings

            warnings.warn(f"lifetrace: {fault}", stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stored(), name)

    def __repr__(self) -> str:
        return repr(self._stored()) if self._finished else f"<trace of {self.path}, recording>"

    def _repr_html_(self) -> str:
        return self._stored()._repr_html_()

    def _stored(self) -> Trace:
        """What was written: remembered once the block has ended, read anew while it goes."""
        if self._trace is None:
            trace = read_trace(self._session.path)
            if not self._finished:
                return trace
            self._trace = trace
        return self._trace
