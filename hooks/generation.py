"""The seams of `generate`: where a call begins and ends, prepares inputs, chooses and checks.

The real `generate` runs. Four methods of the model's class are wrapped while a trace is on,
so that nothing is stored in the model itself (it copies and pickles as ever); models of the
same class that are not traced pass straight through.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lifetrace.errors import ModelError

from .guard import guarded
from .recorder import STOP, STREAM, Call, Recorder, begins, ends

_lock = threading.Lock()
_recorders: dict[int, Recorder] = {}
_patched: dict[type, tuple[int, dict[str, Any]]] = {}


class MarkedProcessors(LogitsProcessorList):
    """The logits processors of a call, in the same order, marked at their beginning and end."""

    def __init__(self, processors: LogitsProcessorList, recorder: Recorder) -> None:
        super().__init__(processors)
        self.recorder = recorder

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Process the scores as the list itself does."""
        self.recorder.choosing_begins()
        scores = super().__call__(input_ids, scores, **kwargs)
        self.recorder.choosing_ends()
        return scores


class MarkedCriteria(StoppingCriteriaList):
    """The stopping criteria of a call, marked where they begin and end."""

    def __init__(self, criteria: StoppingCriteriaList, recorder: Recorder) -> None:
        super().__init__(criteria)
        self.recorder = recorder

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Check as the list itself does."""
        self.recorder.checking(input_ids.shape[-1])
        done = super().__call__(input_ids, scores, **kwargs)
        self.recorder.mark(ends(STOP))
        return done


class MarkedStreamer(BaseStreamer):
    """A streamer that passes on to the user's own, marked while that one works."""

    def __init__(self, streamer: BaseStreamer, recorder: Recorder) -> None:
        self.streamer = streamer
        self.recorder = recorder

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on."""
        self.recorder.mark(begins(STREAM))
        self.streamer.put(value)
        self.recorder.mark(ends(STREAM))

    def end(self) -> None:
        """Pass the end on."""
        self.recorder.mark(begins(STREAM))
        self.streamer.end()
        self.recorder.mark(ends(STREAM))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.streamer, name)


def watch(model: Any, recorder: Recorder) -> None:
    """Report the generates of a model to the recorder, until `unwatch`.

    Raises:
        ModelError: when it is being traced already.
    """
    cls = type(model)
    with _lock:
        if id(model) in _recorders:
            raise ModelError(f"This {cls.__name__} is being traced already; end the first trace before another.")
        _recorders[id(model)] = recorder
        count, originals = _patched.get(cls, (0, {}))
        if count == 0:
            originals = _wrap(cls)
        _patched[cls] = (count + 1, originals)


def unwatch(model: Any) -> None:
    """Stop reporting; the class is as it was before once its last model is released."""
    cls = type(model)
    with _lock:
        if _recorders.pop(id(model), None) is None:
            return
        count, originals = _patched[cls]
        if count > 1:
            _patched[cls] = (count - 1, originals)
            return
        del _patched[cls]
        for name, original in originals.items():
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)


def _wrap(cls: type) -> dict[str, Any]:
    """Wrap the seams that the class has; return what its own dictionary held under each name."""
    originals = {}
    for name, seam in _SEAMS.items():
        function = getattr(cls, name, None)
        if function is None:
            continue
        originals[name] = cls.__dict__.get(name)
        setattr(cls, name, _seam(cls, function, seam))
    return originals


def _seam(cls: type, function: Callable[..., Any], seam: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A wrapped parent class sees the same object through super(): the object's own class counts.
        recorder = _recorders.get(id(self)) if type(self) is cls else None
        if recorder is None:
            return function(self, *args, **kwargs)
        return seam(recorder, function, self, args, kwargs)

    return wrapper


def _generate(recorder: Recorder, function: Any, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    opened = _begin(recorder, args, kwargs)
    if opened is None:
        return function(model, *args, **kwargs)
    call, outer = opened
    failed = True
    try:
        if kwargs.get("streamer") is not None:
            kwargs = kwargs | {"streamer": MarkedStreamer(kwargs["streamer"], recorder)}
        output = function(model, *args, **kwargs)
        _note_output(recorder, call, output)
        failed = False
        return output
    except BaseException as error:
        _note_error(recorder, call, error)
        raise
    finally:
        recorder.end_call(outer, failed)


@guarded
def _begin(recorder: Recorder, args: Any, kwargs: dict[str, Any]) -> tuple[Call, Any]:
    recorder.hand_ends(reached_head=False)
    # A generate inside a generate drafts for it; it may be of this model or of another.
    role = "main" if recorder.current_call() is None else "assistant"
    if kwargs.get("assistant_model") is not None:
        recorder.on_assistant(kwargs["assistant_model"])
    call, outer = recorder.begin_call("generate", role)
    _note_inputs(call, args, kwargs)
    return call, outer


@guarded
def _note_error(recorder: Recorder, call: Call, error: BaseException) -> None:
    call.error = f"{type(error).__name__}: {error}"


def _note_inputs(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = args[0] if args else next((kwargs[k] for k in ("inputs", "input_ids") if kwargs.get(k) is not None), None)
    embeds = kwargs.get("inputs_embeds")
    if isinstance(given, torch.Tensor):
        call.prompt_ids = given
        call.prompt_length = given.shape[-1]
    elif isinstance(embeds, torch.Tensor):
        call.prompt_length = embeds.shape[1]
    mask = kwargs.get("attention_mask")
    call.prompt_mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


@guarded
def _note_output(recorder: Recorder, call: Call, output: Any) -> None:
    sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
    if isinstance(sequences, torch.Tensor):
        # Codebooks of one sequence stand in a dimension of their own; each is a sequence of tokens.
        call.output_ids = sequences.flatten(0, -2) if sequences.dim() > 2 else sequences


def _prepare(recorder: Recorder, function: Any, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    recorder.preparing()
    return function(model, *args, **kwargs)


def _processors(recorder: Recorder, function: Any, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return MarkedProcessors(function(model, *args, **kwargs), recorder)


def _criteria(recorder: Recorder, function: Any, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    criteria = function(model, *args, **kwargs)
    _note_criteria(recorder, criteria)
    return MarkedCriteria(criteria, recorder)


@guarded
def _note_criteria(recorder: Recorder, criteria: StoppingCriteriaList) -> None:
    """Remember what can end the call; which one did is told from the tokens afterwards."""
    call = recorder.current_call()
    if call is None:
        return
    own = []
    for criterion in criteria:
        if (eos := getattr(criterion, "eos_token_id", None)) is not None:
            call.eos = eos  # may lie on the device: read after the call
        elif (length := getattr(criterion, "max_length", None)) is not None:
            call.max_length = int(length)
        else:
            own.append(type(criterion).__name__)
    call.criteria = tuple(own)


def _refuse_batching(recorder: Recorder, function: Any, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not recorder.refuses_batches:
        recorder.batches_passed += 1
        return function(model, *args, **kwargs)
    raise ModelError(
        "lifetrace does not trace continuous batching (generate_batch): its requests share forwards. "
        "Use generate(), or end the trace before."
    )


_SEAMS: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "generate_batch": _refuse_batching,
    "prepare_inputs_for_generation": _prepare,
    "_get_logits_processor": _processors,
    "_get_stopping_criteria": _criteria,
}
