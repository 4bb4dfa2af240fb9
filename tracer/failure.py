"""Where a step was when it failed: the innermost thing that had begun and not ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from lifetrace.hooks.attach import Slot
from lifetrace.hooks.recorder import FIRST_MODULE_SLOT, FORWARD, LOGITS, STOP, STREAM, Step
from lifetrace.hooks.stages import Place

from .steps import phase_of

LOOP_PLACES = {
    LOGITS: Place("sample", part="logits"),
    STOP: Place("sample", part="stop_check"),
    STREAM: Place("sample"),
}


@dataclass(frozen=True)
class Failure:
    """A failed step. `allocated_bytes` were held when the error passed the model; null on a CPU, and outside of it.

    `kv_bytes` is the storage of the cache before the step; `module` is null outside of every module
    that was recorded. `prompt_length` and `max_length` are tokens of a sequence of the call.
    """

    step: int
    phase: str
    place: Place
    module: str | None
    batch: int | None
    q_len: int | None
    kv_len_before: int | None
    kv_bytes: int | None
    allocated_bytes: int | None
    prompt_length: int | None
    max_length: int | None


def failure_of(step: Step, slots: Sequence[Slot]) -> Failure:
    """Read a failed step's marks."""
    slot = _innermost(step.marks().codes)
    signature = step.signature
    module = slots[slot].module if slot is not None and slot >= FIRST_MODULE_SLOT else None
    return Failure(
        step=step.index,
        phase=phase_of(step),
        place=_place(slot, slots, step),
        module=module,
        batch=signature.batch if signature is not None else None,
        q_len=signature.q_len if signature is not None else None,
        kv_len_before=signature.kv_len_before if signature is not None else None,
        kv_bytes=step.kv_before.allocated_bytes,
        allocated_bytes=step.memory[0],
        prompt_length=step.call.prompt_length or None,
        max_length=step.call.max_length,
    )


def _innermost(codes: Sequence[int]) -> int | None:
    """The slot that began last of those without an end; the step and its forward always end."""
    open_slots: list[int] = []
    for code in codes:
        slot, is_end = divmod(code, 2)
        if not is_end:
            open_slots.append(slot)
        elif slot in open_slots:
            open_slots.reverse()
            open_slots.remove(slot)
            open_slots.reverse()
    return open_slots[-1] if open_slots else None


def _place(slot: int | None, slots: Sequence[Slot], step: Step) -> Place:
    if slot is not None and slot >= FIRST_MODULE_SLOT:
        return slots[slot].place
    if slot in LOOP_PLACES:
        return LOOP_PLACES[slot]
    if not step.forwarded:
        return Place("prepare")
    return Place("sample") if slot != FORWARD and step.chose else Place("other")
