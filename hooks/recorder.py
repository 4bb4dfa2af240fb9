"""Cuts what the hooks mark into steps and calls; knows the loop, not what a step means.

A step is one forward of the model with what the generation loop does before and after it. It
opens when the loop prepares inputs (or a forward begins outside the loop) and closes when the
next one opens, or the call returns. A forward inside another step (guidance, the model as its
own assistant) is a step of its own: the outer one is set aside until it ends.
"""

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from . import kvcache
from .clocks import Marks, Pending, Tape
from .guard import guarded
from .kvstate import NOTHING, CacheWatch, KVState

# Slots 0 to 6 belong to the loop; modules follow. A code is twice its slot, plus one at the end.
STEP, FORWARD, LOGITS, STOP, STREAM, NESTED, COMMUNICATION = range(7)
FIRST_MODULE_SLOT = 7
FLUSHING_SHARE = 0.005
LONGEST_WAIT = 4
# Tensors of a forward that the rest of its signature tells of.
USUAL_ARGUMENTS = frozenset(
    (
        "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "logits_to_keep",
        *kvcache.CACHE_ARGUMENTS,
    )
)  # fmt: skip


def begins(slot: int) -> int:
    """The code that marks the beginning of a slot."""
    return 2 * slot


def ends(slot: int) -> int:
    """The code that marks the end of a slot."""
    return 2 * slot + 1


class Signature(NamedTuple):
    """All that decides what a forward computes, apart from the weights and the token values.

    `kv` says of which make the cache is, its lengths left out; `kv_len_before` how many positions
    it has seen; `head_positions` how many positions the head computed; `extras` name, shape and
    dtype of further tensors that the forward was given (images, say).
    """

    batch: int
    q_len: int
    kv: tuple[kvcache.LayerKV, ...]
    cache_class: str | None
    kv_len_before: int | None
    head_positions: int | None
    masked: bool
    embeds: bool
    use_cache: bool
    extras: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()


@dataclass
class Call:
    """One generate, or one plain forward outside of it."""

    index: int
    kind: str
    repeat: int
    start_ns: int
    request_start_ns: int | None = None
    parent_step: int | None = None
    end_ns: int | None = None
    prompt_ids: torch.Tensor | None = None
    prompt_mask: torch.Tensor | None = None
    prompt_length: int = 0
    output_ids: torch.Tensor | None = None
    eos: Any = None
    max_length: int | None = None
    criteria: tuple[str, ...] = ()
    error: str | None = None
    has_chosen: bool = False
    step_count: int = 0
    cache_watch: CacheWatch = field(default_factory=CacheWatch)


@dataclass(slots=True)
class Step:
    """One step as it was seen. `pending` holds its marks once the step is closed."""

    index: int
    call: Call
    role: str
    parent: int | None
    ordinal: int = 0
    model: int = 0
    prefill: bool = True
    detailed: bool = True
    signature: Signature | None = None
    kv_before: KVState = NOTHING
    kv_after: KVState = NOTHING
    kv_len_after: int | None = None
    length_after: int | None = None
    forwarded: bool = False
    choosing: bool = False
    chose: bool = False
    failed: bool = False
    memory: tuple[int | None, int | None, int | None] = (None, None, None)
    pending: Pending | None = None
    chosen_experts: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    hand_cache: weakref.ref[Any] | None = None

    def distinct_experts(self) -> dict[tuple[str, int], int]:
        """How many different experts each call of each expert module used, by module and call index."""
        seen: Counter[str] = Counter()
        counts = {}
        for module, choice in self.chosen_experts:
            counts[module, seen[module]] = int(torch.unique(choice).numel())
            seen[module] += 1
        self.chosen_experts = []
        return counts

    def marks(self) -> Marks:
        """The marks of the closed step; waits for the device if it must."""
        assert self.pending is not None
        marks = self.pending.read(wait=True)
        assert marks is not None
        return marks


class _Thread(threading.local):
    """What one thread is in the middle of."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.step: Step | None = None
        self.is_telling = False


class Recorder:
    """Receives marks and loop events, and hands finished steps on in batches.

    Args:
        tape: where hooks leave their marks.
        on_steps: called with finished steps, in the thread that generates, before a step begins.
        read_memory: returns (allocated, reserved, peak) bytes, or None each.
        wants: whether the modules of a call's Nth step are marked; `on_toggle` is told of changes.
        flush_steps: hand on when so many steps are finished,
        flush_seconds: or when so much time has passed since the last time; up to `LONGEST_WAIT` times as much where
            handing on would else take more than `FLUSHING_SHARE` of the time.
    """

    def __init__(
        self,
        tape: Tape,
        on_steps: Callable[[list[Step]], None],
        read_memory: Callable[[], tuple[int | None, int | None, int | None]],
        wants: Callable[[int], bool] = lambda step_in_call: True,
        flush_steps: int = 64,
        flush_seconds: float = 2.0,
    ) -> None:
        self.tape = tape
        self.on_steps = on_steps
        self.read_memory = read_memory
        self.wants = wants
        self.on_toggle: Callable[[bool], None] = lambda detailed: None
        self.on_assistant: Callable[[Any], None] = lambda model: None
        self.flush_steps = flush_steps
        self.flush_seconds = flush_seconds
        self.calls: list[Call] = []
        self.fault: Exception | None = None  # of our own: from then on events pass by
        self.refuses_batches = True  # continuous batching, which cannot be traced: refused, or passed by
        self.batches_passed = 0
        self.repeat = 0
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._step_numbers = itertools.count()
        self._finished: list[Step] = []
        self._due = time.monotonic() + flush_seconds

    # -- calls ---------------------------------------------------------------------------

    @guarded
    def begin_call(self, kind: str, role: str = "main") -> tuple[Call, tuple[Call | None, Step | None, Any]]:
        """Open a call; returns it with what the thread was in the middle of, for `end_call`.

        An assistant drafts for the step to come: the one that has chosen its tokens ends before.
        """
        self.hand_ends(reached_head=False)
        step = self._thread.step
        if step is not None and step.chose and not step.choosing:
            self.preparing()
        if self._thread.step is None:
            self._flush_if_due()
        outer = self._set_aside()
        with self._lock:
            parent = outer[1].index if outer[1] is not None else None
            call = Call(len(self.calls), kind, self.repeat, perf_counter_ns(), parent_step=parent)
            self.calls.append(call)
        self._thread.call = call
        if kind == "generate":
            self._open_step(role)
        return call, outer

    @guarded
    def end_call(self, outer: tuple[Call | None, Step | None, Any], failed: bool = False) -> None:
        """Close the call and its last step, and take up again what was set aside."""
        call, step = self._thread.call, self._thread.step
        assert call is not None
        if step is not None:
            step.failed = step.failed or failed or not step.forwarded
            self._close_step()
        call.end_ns = perf_counter_ns()
        self._take_up(outer)

    @guarded
    def mark(self, code: int) -> None:
        """Leave a mark of the loop's own."""
        self.tape.mark(code)

    @guarded
    def telling_begins(self) -> bool:
        """A collective begins; says whether it is marked, as the outermost one of a step that is."""
        thread = self._thread
        if thread.step is None or thread.is_telling:
            return False
        thread.is_telling = True
        self.tape.mark(begins(COMMUNICATION))
        return True

    @guarded
    def telling_ends(self) -> None:
        """The collective that was marked has ended."""
        self._thread.is_telling = False
        self.tape.mark(ends(COMMUNICATION))

    def current_call(self) -> Call | None:
        """The call that this thread is in."""
        return self._thread.call

    def _set_aside(self) -> tuple[Call | None, Step | None, Any]:
        thread = self._thread
        outer = (thread.call, thread.step, None)
        if thread.step is not None:
            self.tape.mark(begins(NESTED))
            outer = (thread.call, thread.step, self.tape.suspend())
        thread.call = thread.step = None
        return outer

    def _take_up(self, outer: tuple[Call | None, Step | None, Any]) -> None:
        thread = self._thread
        thread.call, thread.step, suspended = outer
        if thread.step is not None:
            self.tape.resume(suspended)
            self.tape.mark(ends(NESTED))

    # -- steps ---------------------------------------------------------------------------

    @guarded
    def preparing(self) -> None:
        """The loop prepares the inputs of a forward: the next step begins here."""
        step = self._thread.step
        if step is not None and step.forwarded and not step.choosing:
            role = step.role
            self._close_step()
            self._flush_if_due()
            self._open_step(role)

    @guarded
    def forward_begins(self, arguments: dict[str, Any], model: int = 0) -> tuple[Call | None, Step | None, Any] | None:
        """The forward of a model (0, or the number of an assistant) begins; returns what `forward_ends` needs."""
        self.hand_ends(reached_head=False)
        thread = self._thread
        outer = None
        if thread.step is not None and thread.step.forwarded:
            if thread.step.choosing:
                call = thread.call
                outer = self._set_aside()
                thread.call = call
                self._open_step("guidance", parent=outer[1])
            else:
                self.preparing()
        elif thread.step is None:
            if thread.call is None:
                outer = self.begin_call("forward")[1]
            self._open_step("main")
        step = thread.step
        assert step is not None
        step.model = model
        cache = kvcache.find_cache(arguments)
        step.kv_before, seen = step.call.cache_watch.before(cache)
        step.signature = _signature(arguments, cache, seen, step.kv_before)
        if step.call.kind == "forward":
            step.prefill = step.signature.kv_len_before == 0 or step.signature.q_len > 1
        self.tape.mark(begins(FORWARD))
        return outer

    @guarded
    def forward_ends(self, arguments: dict[str, Any], output: Any, outer: Any) -> None:
        """The model's forward returned: note the cache, and close a step that stands alone."""
        self.tape.mark(ends(FORWARD))
        thread = self._thread
        step = thread.step
        assert step is not None
        assert step.signature is not None
        if output is None:
            step.failed = True
        else:
            self._note_cache(step, arguments, output)
        step.forwarded = True
        step.memory = self.read_memory()
        if step.call.kind == "forward":
            self.end_call(outer)
        elif outer is not None:
            self._close_step()
            self._take_up(outer)

    def _note_cache(self, step: Step, arguments: dict[str, Any], output: Any) -> None:
        signature = step.signature
        assert signature is not None
        cache = kvcache.find_cache(output) if isinstance(output, dict) else None
        cache = cache if cache is not None else kvcache.find_cache(arguments)
        before = signature.kv_len_before
        expected = before + signature.q_len if before is not None else None
        step.kv_after, seen = step.call.cache_watch.after(cache, expected)
        step.kv_len_after = seen if cache is not None else signature.q_len

    @guarded
    def experts_chosen(self, module: str, choice: torch.Tensor) -> None:
        """A router's choice reached the experts: kept until the step is handed on, and read only then."""
        if self._thread.step is not None:
            self._thread.step.chosen_experts.append((module, choice))

    # -- stages called by hand -----------------------------------------------------------

    def by_hand(self) -> bool:
        """Whether this thread runs stages by itself, outside of any forward of the model."""
        thread = self._thread
        return thread.step is None or thread.step.call.kind == "modules"

    @guarded
    def hand_begins(self, given: torch.Tensor) -> None:
        """The embedding was called by hand with ids of shape [batch, positions]: a step begins."""
        self.begin_call("modules")
        self._open_step("main")
        step = self._thread.step
        assert step is not None
        step.signature = _signature({"input_ids": given, "use_cache": False}, None, 0, NOTHING)
        self.tape.mark(begins(FORWARD))

    @guarded
    def hand_cache(self, arguments: dict[str, Any]) -> None:
        """The first layer of such a step was called: what it was given tells of a cache."""
        step, cache = self._thread.step, kvcache.find_cache(arguments)
        if step is None or step.signature is None or cache is None:
            return
        step.kv_before, seen = step.call.cache_watch.before(cache)
        family = step.kv_before.layout.family
        step.signature = step.signature._replace(use_cache=True, kv=family, kv_len_before=seen)
        step.prefill = seen == 0 or step.signature.q_len > 1
        step.hand_cache = weakref.ref(cache)

    @guarded
    def hand_ends(self, reached_head: bool) -> None:
        """The head was called, or something else begins: the step by hand ends, if there is one.

        One that did not come to the head is no forward of the model, and not counted as one.
        """
        step = self._thread.step
        if step is None or step.call.kind != "modules":
            return
        self.tape.mark(ends(FORWARD))
        step.forwarded = True
        step.failed = not reached_head
        cache = step.hand_cache() if step.hand_cache is not None else None
        if cache is not None and step.signature is not None:
            step.kv_after, step.kv_len_after = step.call.cache_watch.after(cache, None)
        self.end_call((None, None, None))

    # -- choosing ------------------------------------------------------------------------

    @guarded
    def choosing_begins(self) -> None:
        """The logits processors begin."""
        self.tape.mark(begins(LOGITS))
        if self._thread.step is not None:
            self._thread.step.choosing = True

    @guarded
    def choosing_ends(self) -> None:
        """The logits processors have ended; a token is chosen next."""
        self.tape.mark(ends(LOGITS))
        step = self._thread.step
        if step is not None:
            step.choosing = False
            step.chose = True
            step.call.has_chosen = True

    @guarded
    def checking(self, length: int) -> None:
        """The stopping criteria begin, with sequences of this many tokens: those of this step are chosen."""
        self.tape.mark(begins(STOP))
        step = self._thread.step
        if step is not None:
            step.length_after = length
            step.chose = step.call.has_chosen = True

    def _open_step(self, role: str, parent: Step | None = None) -> None:
        call = self._thread.call
        assert call is not None
        parent_index = parent.index if parent is not None else call.parent_step
        step = Step(next(self._step_numbers), call, role, parent_index, prefill=not call.has_chosen)
        if parent is not None:
            step.prefill = parent.prefill
        step.ordinal = call.step_count
        step.detailed = self.wants(step.ordinal)
        call.step_count += 1
        self.on_toggle(step.detailed)
        self._thread.step = step
        self.tape.mark(begins(STEP))

    def _close_step(self) -> None:
        self.tape.mark(ends(STEP))
        step = self._thread.step
        assert step is not None
        step.pending = self.tape.cut()
        self._thread.step = None
        with self._lock:
            self._finished.append(step)

    def _flush_if_due(self) -> None:
        """Hand steps on when they are many or old: before a step begins, never while a call returns."""
        waiting = len(self._finished)
        if waiting >= self.flush_steps or (waiting and time.monotonic() >= self._due):
            self.flush()

    def flush(self) -> None:
        """Hand on all finished steps."""
        with self._lock:
            steps, self._finished = self._finished, []
            began = time.monotonic()
            if steps:
                self.on_steps(steps)
            ended = time.monotonic()
            wait = (ended - began) / FLUSHING_SHARE
            self._due = ended + max(self.flush_seconds, min(wait, LONGEST_WAIT * self.flush_seconds))


def _signature(arguments: dict[str, Any], cache: Any, seen: int | None, kv_before: KVState) -> Signature:
    """Read the signature from a forward's arguments, by metadata alone."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    given = ids if ids is not None else embeds
    batch, q_len = (given.shape[0], given.shape[1]) if given is not None and given.dim() > 1 else (1, 0)
    keep = arguments.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor):
        head_positions: int | None = keep.numel()
    else:
        head_positions = min(int(keep), q_len) if keep else q_len
    return Signature(
        batch=batch,
        q_len=q_len,
        kv=kv_before.layout.family,
        cache_class=type(cache).__name__ if cache is not None else None,
        kv_len_before=seen,
        head_positions=head_positions,
        masked=isinstance(arguments.get("attention_mask"), torch.Tensor),
        embeds=ids is None and embeds is not None,
        use_cache=bool(arguments.get("use_cache", True)),
        extras=tuple(
            (name, tuple(value.shape), value.dtype)
            for name, value in arguments.items()
            if name not in USUAL_ARGUMENTS and isinstance(value, torch.Tensor)
        ),
    )
