"""Marks what the processes of one model tell each other: the collectives that torch.distributed runs for a forward.

Tensor parallelism calls them as functions of two modules of torch, which are replaced by ones that
mark while a trace is on. A function that a program took out of its module before is not seen, nor
is what it waits for later by itself.
"""

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .recorder import Recorder

OF_TENSORS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "gather",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "barrier",
)  # fmt: skip
# Their functional forms, which DTensor uses: started by one function, waited for by another.
FUNCTIONAL = (
    "all_reduce", "all_gather_tensor", "all_to_all_single", "broadcast", "permute_tensor", "reduce_scatter_tensor",
    "wait_tensor",
)  # fmt: skip

_lock = threading.Lock()
_recorders: list[Recorder] = []
_originals: list[tuple[ModuleType, str, Any]] = []


def watch(recorder: Recorder) -> None:
    """Mark collectives for a recorder until `unwatch`, also of processes that begin to talk only later."""
    if not dist.is_available():
        return
    with _lock:
        _recorders.append(recorder)
        if len(_recorders) == 1:
            _replace()


def unwatch(recorder: Recorder) -> None:
    """Stop; with the last recorder torch is as it was before."""
    with _lock:
        if recorder not in _recorders:
            return
        _recorders.remove(recorder)
        if not _recorders:
            for module, name, original in _originals:
                setattr(module, name, original)
            _originals.clear()


def _replace() -> None:
    import torch.distributed._functional_collectives as functional

    for module, names in ((dist, OF_TENSORS), (functional, FUNCTIONAL)):
        for name in names:
            original = getattr(module, name, None)
            if original is not None:
                _originals.append((module, name, original))
                setattr(module, name, _marked(original))


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        told = [recorder for recorder in _recorders if recorder.telling_begins()]
        try:
            return original(*args, **kwargs)
        finally:
            for recorder in told:
                recorder.telling_ends()

    return collective
