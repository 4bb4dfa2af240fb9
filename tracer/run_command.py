"""The main job: load, warm up, generate with and without tracing in turn, and close the trace."""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from lifetrace.analysis.post_mortem import post_mortem_words
from lifetrace.errors import Interrupted, LifetraceError, RunError, UsageError
from lifetrace.hooks.memory import peak_reader
from lifetrace.hooks.recorder import Call

from . import logprobs, workload
from .plan import Planner, predict_memory
from .plan_subject import Request
from .post_mortem import post_mortem
from .session import Options, Session, jsonable, new_folder, status_of
from .workload import Loaded, ModelSource, Prompts, first_line
from .writer import prepare_folder, remove_trace

# Settings of generate() that leave one forward a token over a growing cache, which is what is planned.
PLANNED_SETTINGS = {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class RunSettings:
    """All that `lifetrace run` was told."""

    source: ModelSource
    prompts: Prompts
    options: Options
    max_new_tokens: int = 64
    generation: dict[str, Any] | None = None
    seed: int = 0
    warmup: int = 1
    repeats: int = 3
    baseline: bool = True
    logprobs: int | None = None
    ops: bool = False
    memory: bool = True
    memory_limit_bytes: int | None = None
    out: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class Generated:
    """One generate: its output ids, how many of them are new, and how long it took."""

    ids: torch.Tensor
    new_tokens: int
    seconds: float


def run(settings: RunSettings, progress: Progress) -> Path:
    """Trace the run and return the folder of its trace.

    Raises:
        UsageError, ModelError, TraceError: bad input; nothing was run.
        RunError: the run began and failed; its trace says how far it came.
    """
    path = settings.out if settings.out is not None else new_folder(settings.source.name)
    prepare_folder(path, settings.force)
    progress(f"loading {settings.source.name}")
    with _empty_folder_removed(path):
        loaded = workload.load(settings.source)
    record(settings, loaded, path, progress)
    return path


def record(settings: RunSettings, loaded: Loaded, path: Path, progress: Progress) -> None:
    """Trace the run of a model that is loaded already into a prepared folder; raises as `run` does."""
    with _empty_folder_removed(path):
        workload.check_prompts(settings.prompts, loaded)
        inputs = workload.encode(settings.prompts, loaded)
        workload.check_length(loaded, inputs["input_ids"].shape[1], settings.max_new_tokens)
        session = Session(loaded.model, path, settings.options, loaded.tokenizer, _facts(settings, loaded))
        session.on_out_of_memory = post_mortem
        session.findings += loaded.notes
        if loaded.tokenizer is None:
            session.findings.append("this model has no tokenizer: each byte of the prompt was taken as a token")
    _trace(settings, loaded, session, progress)


@contextlib.contextmanager
def _empty_folder_removed(path: Path) -> Iterator[None]:
    """A run that did not begin leaves no empty folder behind."""
    try:
        yield
    except (LifetraceError, KeyboardInterrupt):
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def _facts(settings: RunSettings, loaded: Loaded) -> dict[str, Any]:
    """What the manifest says beyond what a session knows."""
    return {
        "command": shlex.join(["lifetrace", *sys.argv[1:]]),
        "model": loaded.facts,
        "prompt": list(settings.prompts.texts),
        "generation": jsonable(_generate_settings(settings)) | {"seed": settings.seed},
        "settings": asdict(settings.options)
        | {"warmup": settings.warmup, "repeats": settings.repeats, "baseline": settings.baseline},
    }


def _generate_settings(settings: RunSettings) -> dict[str, Any]:
    return {"max_new_tokens": settings.max_new_tokens} | (settings.generation or {})


def _trace(settings: RunSettings, loaded: Loaded, session: Session, progress: Progress) -> None:
    session.start(attach=False)
    warmed: list[Generated] = []
    untraced: list[Generated] = []
    traced: list[Generated] = []
    try:
        warmed = _warm_up(settings, loaded, session, progress)
        _alternate(settings, loaded, session, progress, untraced, traced)
        session.facts["overhead"] = overhead(untraced, traced) if settings.baseline else None
        if settings.memory:
            progress("measuring memory")
            inputs = workload.encode(settings.prompts, loaded)
            if loaded.device.type == "cuda":
                session.measure_memory(lambda: _generate(settings, loaded, inputs), peak_reader(loaded.device))
            session.measure_live_bytes(lambda: _generate(settings, loaded, inputs))
            session.facts["predictions"] = _predictions(settings, loaded, session, inputs["input_ids"])
        if settings.ops:
            progress("profiling operators")
            inputs = workload.encode(settings.prompts, loaded)
            session.profile(lambda: _generate(settings, loaded, inputs))
        if settings.logprobs is not None:
            progress("reading log-probabilities")
            session.token_details = logprobs.details(loaded.model, session.sequences(), settings.logprobs)
    except BaseException as error:
        session.finish(status_of(error), error)
        if isinstance(error, LifetraceError):
            raise
        if isinstance(error, KeyboardInterrupt):
            path = session.path
            raise Interrupted(f"Interrupted; {path} holds what was recorded before: lifetrace show {path}") from None
        if _refused(error, warmed + untraced + traced):
            remove_trace(session.path)
            session.path.rmdir()
            raise UsageError(f"generate() refused these settings: {first_line(error)}.") from error
        raise _run_error(error, session) from error
    progress("counting and writing")
    session.finish("complete", progress=progress)
    if session.faults:
        raise session.faults[0]


def _predictions(
    settings: RunSettings, loaded: Loaded, session: Session, prompt: torch.Tensor
) -> dict[str, Any] | None:
    """What `plan` says that this run holds; null where it generates in a way that no plan is made of."""
    call = session.recorder.calls[-1]
    if set(settings.generation or {}) - PLANNED_SETTINGS or call.step_count != _new_positions(call, prompt):
        return None
    request = Request(
        config=loaded.model.config,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        batch=prompt.shape[0],
        prompt_length=prompt.shape[1],
        max_new_tokens=call.step_count,
        attention=getattr(loaded.model.config, "_attn_implementation", None),
    )
    try:
        rows = predict_memory(Planner(request))
    except LifetraceError as reason:
        session.findings.append(f"what this run would hold could not be planned: {reason}")
        return None
    return {"rows": [asdict(row) for row in rows]}


def _new_positions(call: Call, prompt: torch.Tensor) -> int | None:
    """Tokens that a call put behind its prompt: as many as its steps, where each gives one."""
    return call.output_ids.shape[-1] - prompt.shape[1] if call.output_ids is not None else None


def _refused(error: BaseException, done: list[Generated]) -> bool:
    """Whether the very first generate() ended for settings that cannot be."""
    bad_value = isinstance(error, ValueError | TypeError | ZeroDivisionError | NotImplementedError | ImportError)
    return bad_value and not done


def _run_error(error: BaseException, session: Session) -> RunError:
    rest = f"The trace in {session.path} holds what was recorded before."
    if status_of(error) == "oom":
        found = session.manifest.get("post_mortem")
        what = " ".join(post_mortem_words(found)) if found else f"The run ran out of memory: {first_line(error)}."
        return RunError(f"{what} {rest}")
    return RunError(f"The run failed with {type(error).__name__}: {first_line(error)}. {rest}")


def _warm_up(settings: RunSettings, loaded: Loaded, session: Session, progress: Progress) -> list[Generated]:
    """Generate unrecorded; the first time so that a failure is known by its place, and within the memory limit."""
    done: list[Generated] = []

    def generate() -> None:
        done.append(_generate(settings, loaded, workload.encode(settings.prompts, loaded)))

    limit = _limit_memory(settings.memory_limit_bytes, loaded.device)
    if limit is not None or settings.warmup:
        progress("trying whether it fits" if limit is not None else f"warming up 1/{settings.warmup}")
        session.rehearse(generate, limit)
    for number in range(1, settings.warmup):
        progress(f"warming up {number + 1}/{settings.warmup}")
        generate()
    return done


def _limit_memory(limit_bytes: int | None, device: torch.device) -> int | None:
    """Set the limit on CUDA's allocator; return it where it must be watched tensor by tensor instead."""
    if limit_bytes is None or device.type != "cuda":
        return limit_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    return None


def _alternate(
    settings: RunSettings,
    loaded: Loaded,
    session: Session,
    progress: Progress,
    untraced: list[Generated],
    traced: list[Generated],
) -> None:
    """Generate untraced and traced in turn, so that drift meets both alike."""
    for repeat in range(settings.repeats):
        if settings.baseline:
            progress(f"baseline {repeat + 1}/{settings.repeats}{_rate(untraced)}")
            untraced.append(_generate(settings, loaded, workload.encode(settings.prompts, loaded)))
        progress(f"tracing {repeat + 1}/{settings.repeats}{_rate(traced)}")
        traced.append(_traced(settings, loaded, session, repeat))


def _rate(done: list[Generated]) -> str:
    """The speed of the last generate, for the progress line."""
    return f" · {done[-1].new_tokens / done[-1].seconds:.1f} tokens/s" if done else ""


def _traced(settings: RunSettings, loaded: Loaded, session: Session, repeat: int) -> Generated:
    session.recorder.repeat = repeat
    session.attach()
    try:
        start_ns = perf_counter_ns()
        inputs = workload.encode(settings.prompts, loaded)
        session.span("tokenize", start_ns, perf_counter_ns())
        generated = _generate(settings, loaded, inputs)
    finally:
        session.detach()
    session.recorder.flush()  # outside of what was timed
    session.recorder.calls[-1].request_start_ns = start_ns
    if loaded.tokenizer is not None:
        start_ns = perf_counter_ns()
        new = generated.ids[:, inputs["input_ids"].shape[1] :]
        texts = loaded.tokenizer.batch_decode(new, skip_special_tokens=True)
        session.span("detokenize", start_ns, perf_counter_ns())
        session.facts["output"] = texts
    return generated


def _generate(settings: RunSettings, loaded: Loaded, inputs: dict[str, torch.Tensor]) -> Generated:
    torch.manual_seed(settings.seed)
    _synchronize(loaded.device)
    start = time.perf_counter()
    output = loaded.model.generate(**inputs, **_generate_settings(settings))
    _synchronize(loaded.device)
    seconds = time.perf_counter() - start
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    return Generated(ids, ids.numel() - inputs["input_ids"].shape[1] * ids.shape[0], seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def overhead(untraced: list[Generated], traced: list[Generated]) -> dict[str, Any]:
    """Traced ÷ untraced of each neighbouring pair: median, lowest and highest; and whether tokens agree.

    `noise` is the same ratio between untraced neighbours, highest ÷ lowest: what two equal runs
    differ by here.
    """
    ratios = [with_.seconds / without.seconds for without, with_ in zip(untraced, traced, strict=True)]
    alone = [generated.seconds for generated in untraced]
    identical = all(torch.equal(a.ids, b.ids) for a, b in zip(untraced, traced, strict=True))
    return {
        "untraced_s": alone,
        "traced_s": [generated.seconds for generated in traced],
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "noise": max(alone) / min(alone) if len(alone) > 1 else None,
        "tokens_identical": identical,
    }
