"""Follows the live tensor bytes of a model operator by operator: what is held, the peak, and which tensor made it.

Every storage that an operator returns counts with its full size from that operator on until the
last tensor on it is gone; views count once. Works on any device, also on meta tensors, where the
same pass tells what a forward would hold without holding anything. Bytes are those that were asked
for: an allocator's rounding, and what an operator allocates and frees inside its own kernel, are
not among them. It slows what runs under it many times over: a pass of its own, never a timed one.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .attach import on_calls
from .counting import storage_id
from .kvcache import cache_tensors, find_cache

WEIGHT, KV, GIVEN, MADE = "weight", "kv", "given", "made"


@dataclass(frozen=True)
class LiveTensor:
    """One storage, by the first tensor that was seen on it.

    `role`: `weight` (parameters and buffers), `kv` (the cache holds it after its step, or held it
    before), `given` (it was there before the pass, or came from outside), `made` (all else: what is
    transient). `module` is the innermost that ran when it was made: "" for the model itself, None
    outside of its forward. `operator` is null for what no operator made.
    """

    role: str
    bytes_: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    operator: str | None
    module: str | None


@dataclass(frozen=True)
class LiveCall:
    """One module call: live bytes when it began, at most while it ran, and when it ended.

    `step` and `call_index` count from 0, the latter within its step. `maker` is the tensor whose
    making set the peak; null where nothing rose above what was held at the beginning.
    """

    step: int
    module: str
    call_index: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    maker: LiveTensor | None


@dataclass(frozen=True)
class LivePeak:
    """The moment of most live bytes in a step, with all that was live then, largest first.

    `module` and `call_index` say what ran; None outside of the model's forward (sampling).
    `maker` is the tensor whose making set the peak.
    """

    step: int
    bytes_: int
    module: str | None
    call_index: int | None
    maker: LiveTensor | None
    tensors: tuple[LiveTensor, ...]

    def bytes_of(self, role: str) -> int:
        """Bytes of one role; those of all four add up to the peak."""
        return sum(tensor.bytes_ for tensor in self.tensors if tensor.role == role)


class LiveBytes(TorchDispatchMode):
    """Follows one model on the thread that enters it: `with LiveBytes(model) as live: model.generate(…)`.

    A step runs from one forward of the model to the beginning of the next, so that choosing a token
    belongs to the step that gave its logits. After the block `calls` has a row a module call,
    `peaks` one a step, `held` what is live still and was not before, `initial_bytes` the weights,
    `operators` how many ran.
    A block that raises leaves what it saw until then; calls that it cut short end there.

    Args:
        model: the model to follow.
        keep_calls: whether `calls` is wanted; without, a long run leaves only its highest moment
            in `peaks` with its tensors.
        limit_bytes: raise `torch.OutOfMemoryError` before an operator's results are handed out
            that would be live beyond this, as a device of that size would.
    """

    def __init__(self, model: nn.Module, keep_calls: bool = True, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.keep_calls = keep_calls
        self.limit_bytes = limit_bytes
        self.now_bytes = self._risen_bytes = 0
        self.operators = 0
        self._live: dict[int, _Storage] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[_OpenCall] = []
        self._closed: list[_OpenCall] = []
        self._steps = [_OpenStep(0)]
        self._highest: _OpenStep | None = None
        self._forwards = 0
        self._seen: Counter[str] = Counter()
        self._stack = ExitStack()
        for tensor in (*model.parameters(), *model.buffers()):
            self._see(tensor, WEIGHT)
        self.initial_bytes = self.now_bytes

    def __enter__(self) -> "LiveBytes":
        """Attach to the model's modules and begin to follow operators."""
        self._stack.enter_context(on_calls(nn.Sequential(self.model), self._enter_module, self._leave_module))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Detach; calls that an exception cut short end here."""
        super().__exit__(*error)
        self._stack.close()
        while self._open:
            self._close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count the storages that are new."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if storage_id(tensor) not in self._live:
                self._rise(self._see(tensor, GIVEN))
        output = func(*args, **kwargs)
        self.operators += 1
        for tensor in _tensors(output):
            known = self._live.get(storage_id(tensor))
            if known is None:
                self._rise(self._see(tensor, MADE, str(func._overloadpacket)))
                self._check_limit(tensor)
            elif known.bytes_ != (size := tensor.untyped_storage().nbytes()):  # resized in place
                self.now_bytes += size - known.bytes_
                known.bytes_ = size
                self._rise(known)
        return output

    def _check_limit(self, made: torch.Tensor) -> None:
        if self.limit_bytes is not None and self.now_bytes > self.limit_bytes:
            asked = made.untyped_storage().nbytes()
            raise torch.OutOfMemoryError(
                f"out of memory: tried to allocate {asked} bytes with {self.now_bytes - asked} bytes held, "
                f"of a limit of {self.limit_bytes} bytes"
            )

    def reading(self) -> tuple[int, int]:
        """Live bytes now, and at most since the last reading."""
        now, risen = self.now_bytes, self._risen_bytes
        self._risen_bytes = now
        return now, risen

    # -- results -------------------------------------------------------------------------------

    @property
    def peak(self) -> LivePeak:
        """The highest of the steps' peaks; the first where several are as high."""
        return max(self.peaks, key=lambda peak: peak.bytes_)

    @property
    def peaks(self) -> tuple[LivePeak, ...]:
        """The peak of each step."""
        return tuple(step.record() for step in self._steps)

    @property
    def calls(self) -> tuple[LiveCall, ...]:
        """Every module call, in the order in which they ended."""
        return tuple(call.record() for call in self._closed)

    @property
    def held(self) -> tuple[LiveTensor, ...]:
        """What is live now and is no weight, largest first: after the run, what it leaves behind."""
        return _records(storage for storage in self._live.values() if storage.role != WEIGHT)

    # -- storages ------------------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor, role: str, operator: str | None = None) -> "_Storage":
        """Count a storage from now on until it is freed; one that is known already stays as it is."""
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        if key in self._live:
            return self._live[key]
        module = self._open[-1].module if self._open else None
        seen = _Storage(role, storage.nbytes(), tensor, operator, module)
        seen.end = weakref.ref(storage, lambda _: self._forget(key))
        self._live[key] = seen
        self.now_bytes += seen.bytes_
        return seen

    def _forget(self, key: int) -> None:
        freed = self._live.pop(key, None)
        if freed is not None:
            self.now_bytes -= freed.bytes_

    def _rise(self, maker: "_Storage") -> None:
        """Note a new height in every open call, and in the step with all that is live."""
        self._risen_bytes = max(self._risen_bytes, self.now_bytes)
        for call in reversed(self._open):  # an outer call's peak is never below an inner one's
            if self.now_bytes <= call.peak_bytes:
                break
            call.peak_bytes, call.maker = self.now_bytes, maker
        step = self._steps[-1]
        if self.now_bytes > step.peak_bytes:
            step.peak_bytes, step.maker, step.live = self.now_bytes, maker, list(self._live.values())
            step.call = self._open[-1] if self._open else None

    # -- calls ---------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        if module is self.model:
            self._begin_step()
            for tensor in cache_tensors(find_cache(kwargs)):
                self._see(tensor, KV)
        self._open.append(_OpenCall(len(self._steps) - 1, name, self._seen[name], self.now_bytes))
        self._seen[name] += 1

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self.model:
            self._mark_cache(find_cache(kwargs))
            self._mark_cache(find_cache(output) if isinstance(output, dict) else None)
        self._close()

    def _begin_step(self) -> None:
        """What came before the first forward belongs to it."""
        self._forwards += 1
        self._seen.clear()
        if self._forwards > 1:
            if not self.keep_calls:
                self._forget_lower_steps()
            self._steps.append(_OpenStep(len(self._steps)))
            self._steps[-1].start(self.now_bytes, list(self._live.values()))

    def _forget_lower_steps(self) -> None:
        """Let go of what was live at the peaks of all steps but the highest so far."""
        last = self._steps[-1]
        if self._highest is None or last.peak_bytes > self._highest.peak_bytes:
            self._highest, last = last, self._highest or _OpenStep(0)
        last.live = None

    def _mark_cache(self, cache: Any) -> None:
        for tensor in cache_tensors(cache):
            storage = self._live.get(storage_id(tensor))
            if storage is not None and storage.role != WEIGHT:
                storage.role = KV

    def _close(self) -> None:
        call = self._open.pop()
        call.after_bytes = self.now_bytes
        if self.keep_calls:
            self._closed.append(call)


class _Storage:
    """A storage that is or was live. Its role may turn out later: a cache is seen at the end of a step."""

    __slots__ = ("bytes_", "device", "dtype", "end", "module", "operator", "role", "shape")

    def __init__(self, role: str, bytes_: int, tensor: torch.Tensor, operator: str | None, module: str | None) -> None:
        self.role, self.bytes_ = role, bytes_
        self.shape = tuple(tensor.shape)
        self.dtype, self.device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        self.operator, self.module = operator, module
        self.end: Any = None

    def record(self) -> LiveTensor:
        return LiveTensor(self.role, self.bytes_, self.shape, self.dtype, self.device, self.operator, self.module)


@dataclass
class _OpenCall:
    """A module call that runs, or ran."""

    step: int
    module: str
    call_index: int
    before_bytes: int
    peak_bytes: int = 0
    after_bytes: int = 0
    maker: _Storage | None = None

    def __post_init__(self) -> None:
        self.peak_bytes = self.before_bytes

    def record(self) -> LiveCall:
        maker = self.maker.record() if self.maker is not None else None
        return LiveCall(
            self.step, self.module, self.call_index, self.before_bytes, self.peak_bytes, self.after_bytes, maker
        )


@dataclass
class _OpenStep:
    """The highest moment of a step so far, and what was live then."""

    step: int
    peak_bytes: int = 0
    maker: _Storage | None = None
    call: _OpenCall | None = None
    live: list[_Storage] | None = None

    def start(self, bytes_: int, live: list[_Storage]) -> None:
        """Begin with what is held already: a step that makes nothing new has it for its peak."""
        self.peak_bytes, self.live = bytes_, live

    def record(self) -> LivePeak:
        return LivePeak(
            step=self.step,
            bytes_=self.peak_bytes,
            module=self.call.module if self.call is not None else None,
            call_index=self.call.call_index if self.call is not None else None,
            maker=self.maker.record() if self.maker is not None else None,
            tensors=_records(self.live or ()),
        )


def _records(storages: Iterable[_Storage]) -> tuple[LiveTensor, ...]:
    records = [storage.record() for storage in storages]
    return tuple(sorted(records, key=lambda tensor: -tensor.bytes_))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
