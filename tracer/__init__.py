"""lifetrace: where a token's time and memory go in a Hugging Face causal language model.

Public names load on first use, so that reading a trace loads no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis.trace import Trace, read_trace
    from .errors import LifetraceError, ModelError, RunError, TraceError, UsageError
    from .everywhere import trace_all
    from .tracing import trace

_HOMES = {
    "trace": "tracing",
    "trace_all": "everywhere",
    "read_trace": "analysis.trace",
    "Trace": "analysis.trace",
    "LifetraceError": "errors",
    "ModelError": "errors",
    "RunError": "errors",
    "TraceError": "errors",
    "UsageError": "errors",
}

__all__ = [
    "LifetraceError",
    "ModelError",
    "RunError",
    "Trace",
    "TraceError",
    "UsageError",
    "read_trace",
    "trace",
    "trace_all",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lifetrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
