"""A sweep: a run for each point of a grid, each an ordinary trace in a folder of its own; goes on where it ended."""

import contextlib
import gc
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from lifetrace.analysis import units
from lifetrace.analysis.files import replacing
from lifetrace.analysis.runs import run_of
from lifetrace.analysis.sweep import AXES, COMPLETE, FORMAT, SWEEP, Setting, is_sweep, read_document
from lifetrace.analysis.trace import read_trace
from lifetrace.errors import Interrupted, LifetraceError, RunError, TraceError, UsageError

from . import environment, run_command, workload
from .run_command import RunSettings
from .session import jsonable
from .workload import Loaded, ModelSource, first_line
from .writer import prepare_folder

Progress = Callable[[str], None]
SHAPING_VERSIONS = ("lifetrace", "python", "torch", "transformers")
# No token has this id: what a model would say never ends a point before its number of new tokens.
NO_END = {"eos_token_id": -1}


@dataclass(frozen=True)
class SweepSettings:
    """A grid, and what is the same for all its points: a run whose axes the points replace."""

    points: list[Setting]
    base: RunSettings
    out: Path


def sweep(settings: SweepSettings, progress: Progress, announce: Progress) -> list[str]:
    """Trace every point that is not complete yet; return the names of those that failed.

    Args:
        settings: the grid and its run.
        progress: told what goes on inside a point.
        announce: told a line for each point.

    Raises:
        UsageError, ModelError, TraceError: bad input, or a folder of something else; nothing was run.
        RunError: interrupted, or the disk does not take more.
    """
    _check(settings)
    with _alone_in(settings.out):
        record = _Record.opened(settings)
        todo = _todo(settings)
        _announce_start(settings, todo, announce)
        try:
            _run_all(settings, todo, record, progress, announce)
        except (Interrupted, KeyboardInterrupt):
            done = sum(_status(settings.out / point.name) == COMPLETE for point in settings.points)
            raise RunError(
                f"Interrupted: {done} of {len(settings.points)} points in {settings.out} are complete; "
                "the same command goes on with the rest."
            ) from None
        return [point.name for point in settings.points if record.reasons.get(point.name)]


def _check(settings: SweepSettings) -> None:
    """Refuse what no point can be run with, before anything is written."""
    workload.pick_device(settings.base.source.device)
    workload.model_config(settings.base.source)
    names = [point.name for point in settings.points]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"Two points of the grid would lie in the same folder, {twice}; sweep one of them elsewhere.")


def _todo(settings: SweepSettings) -> list[Setting]:
    """The points that are not complete; those in which a process was killed last, since they may do it again."""
    statuses = {point: _status(settings.out / point.name) for point in settings.points}
    rest = [point for point in settings.points if statuses[point] != COMPLETE]
    return sorted(rest, key=lambda point: statuses[point] == "running")


def _status(path: Path) -> str | None:
    try:
        return str(read_trace(path).meta.get("status"))
    except TraceError:
        return None


def _announce_start(settings: SweepSettings, todo: list[Setting], announce: Progress) -> None:
    whole, kept = len(settings.points), len(settings.points) - len(todo)
    found = f", {kept} of them complete already" if kept else ""
    announce(f"{whole} point{'s' * (whole != 1)}{found}, into {settings.out}")


def _run_all(
    settings: SweepSettings, todo: list[Setting], record: "_Record", progress: Progress, announce: Progress
) -> None:
    models, began = _Models(), monotonic()
    threads = torch.get_num_threads()
    try:
        for number, point in enumerate(todo):
            left = _left(monotonic() - began, number, len(todo))
            head = f"{number + 1}/{len(todo)}  {words(point)}"
            reason = _attempt(settings, point, models, threads, _framed(progress, head, left))
            record.note(point, reason)
            left = _left(monotonic() - began, number + 1, len(todo))
            announce(f"{head}: {reason or _figures(settings.out / point.name)}{left}")
    finally:
        torch.set_num_threads(threads)


def _framed(progress: Progress, head: str, left: str) -> Progress:
    return lambda text: progress(f"{head} · {text}{left}")


def words(point: Setting) -> str:
    """A point in words, such as `prompt 32, batch 4, new 16, float32`."""
    chosen = [(axis.prefix, getattr(point, axis.key)) for axis in AXES]
    return ", ".join(f"{prefix} {value}".strip() for prefix, value in chosen if value not in (None, "auto"))


def _left(seconds: float, done: int, whole: int) -> str:
    """The time that the rest takes if its points take as long as those before."""
    if not done or done == whole:
        return ""
    return f" · about {units.duration(seconds / done * (whole - done))} left"


def _figures(path: Path) -> str:
    run = run_of(read_trace(path))
    rate = units.rate(run.decode_tokens_per_s, "tokens/s")
    return f"TTFT {units.time(run.ttft_ns)}, TPOT {units.time(run.tpot_ns)}, {rate}"


# -- a point -----------------------------------------------------------------------------------


@dataclass
class _Models:
    """The model of the last point, kept for the next one that runs the same; or why it could not be loaded."""

    source: ModelSource | None = None
    found: Loaded | LifetraceError | None = None
    attributes: frozenset[str] = field(default_factory=frozenset)

    def get(self, source: ModelSource, progress: Progress) -> Loaded:
        """The model, as it was when it was loaded."""
        if source != self.source:
            self.found = None  # two models may not fit beside each other
            _free_memory()
            progress(f"loading {source.name}")
            self.source, self.found = source, _loaded(source)
            self.attributes = frozenset(vars(self.found.model) if isinstance(self.found, Loaded) else ())
        if isinstance(self.found, LifetraceError):
            raise self.found
        assert self.found is not None
        for name in set(vars(self.found.model)) - self.attributes:
            delattr(self.found.model, name)  # a static cache would be as long as the longest one before
        return self.found


def _loaded(source: ModelSource) -> Loaded | LifetraceError:
    try:
        return workload.load(source)
    except LifetraceError as error:
        return error
    except (RuntimeError, MemoryError) as error:
        return RunError(f"{source.name} could not be loaded: {first_line(error)}.")


def _free_memory() -> None:
    """Give back what an earlier point or model held, so that the next one's peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def _attempt(settings: SweepSettings, point: Setting, models: _Models, threads: int, progress: Progress) -> str | None:
    """Trace a point; return why it failed, or null."""
    path = settings.out / point.name
    try:
        torch.set_num_threads(point.threads or threads)
        run = _run_settings(settings.base, point, path)
        loaded = models.get(run.source, progress)
        _free_memory()
        prepare_folder(path, force=True)
        run_command.record(run, loaded, path, progress)
    except Interrupted:
        raise
    except LifetraceError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - any model's code runs here, and the other points do not depend on it
        return f"{type(error).__name__}: {first_line(error)}."
    return None


def _run_settings(base: RunSettings, point: Setting, path: Path) -> RunSettings:
    cache = {"cache_implementation": point.cache} if point.cache is not None else {}
    texts = tuple(text for text in base.prompts.texts for _ in range(point.batch))
    return replace(
        base,
        source=replace(base.source, dtype=point.dtype, attention=point.attention),
        prompts=replace(base.prompts, texts=texts, length=point.prompt_length),
        max_new_tokens=point.max_new_tokens,
        generation=NO_END | (base.generation or {}) | cache,
        out=path,
    )


# -- the folder --------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Hold the folder, so that no second sweep writes into it; a process that ends in any way lets go of it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise TraceError(f"The folder {path} cannot be used: {error.strerror}. Choose another with --out.") from None
    try:
        _lock(handle, path)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"Another sweep is writing into {path}; wait for it, or choose another --out.") from None
    except OSError:
        return  # a file system without locks


@dataclass
class _Record:
    """`sweep.json`: which points there are, and why some failed."""

    path: Path
    document: dict[str, Any]
    points: list[Setting]
    reasons: dict[str, str]

    @classmethod
    def opened(cls, settings: SweepSettings) -> "_Record":
        """Begin a sweep, or go on with the one in the folder, whose other points stay.

        Raises:
            UsageError: it was made with other settings.
            TraceError: the folder holds something else, or cannot be written.
        """
        document, points, reasons = _document(settings), [], {}
        if is_sweep(settings.out):
            before = read_document(settings.out)
            _refuse_others(settings.out, before, document)
            document["created"] = before.get("created")
            points = [row["setting"] for row in before["points"]]
            reasons = {row["setting"].name: row["reason"] for row in before["points"] if row["reason"]}
        elif any(not _is_leftover(entry) for entry in settings.out.iterdir()):
            raise TraceError(f"The folder {settings.out} holds something that is no sweep; choose another with --out.")
        for leftover in filter(_is_leftover, settings.out.iterdir()):
            leftover.unlink()
        record = cls(settings.out, document, [*dict.fromkeys([*points, *settings.points])], reasons)
        record.write()
        return record

    def note(self, point: Setting, reason: str | None) -> None:
        """Note that a point ended, and why it failed if it did."""
        before = self.reasons.pop(point.name, None)
        if reason is not None:
            self.reasons[point.name] = reason
        if reason != before:
            self.write()

    def write(self) -> None:
        """Replace the file as a whole."""
        rows = [
            {"name": point.name} | asdict(point) | {"reason": self.reasons.get(point.name)} for point in self.points
        ]
        text = json.dumps(self.document | {"points": rows}, indent=1, allow_nan=False)
        with replacing(self.path / SWEEP, "sweep") as file:
            file.write(text.encode("ascii"))


def _is_leftover(entry: Path) -> bool:
    """What a killed process leaves of a `sweep.json` that it was writing."""
    return entry.name.startswith(".sweep.") and entry.name.endswith(".tmp")


def _document(settings: SweepSettings) -> dict[str, Any]:
    device = workload.pick_device(settings.base.source.device)
    facts, versions = environment.device_facts(device), environment.versions()
    return {
        "format": FORMAT,
        "command": shlex.join(["lifetrace", *sys.argv[1:]]),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": _common(settings.base),
        "versions": {name: versions[name] for name in SHAPING_VERSIONS},
        "device": {key: facts.get(key) for key in ("type", "name", "memory_bytes")},
    }


def _common(base: RunSettings) -> dict[str, Any]:
    """What is the same for all points: what the axes replace is left out."""
    source = {key: value for key, value in asdict(base.source).items() if key not in ("dtype", "attention")}
    options = asdict(base.options)
    return source | {
        "prompts": list(base.prompts.texts),
        "chat": base.prompts.chat,
        "generation": jsonable(base.generation or {}),
        "seed": base.seed,
        "detail": options["detail"],
        "warmup": base.warmup,
        "repeats": base.repeats,
        "baseline": base.baseline,
        "memory": base.memory,
    }


def _refuse_others(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to mix points that were made differently; another grid is no difference, it extends the sweep."""
    for part in ("settings", "versions", "device"):
        old, new = before.get(part) or {}, now[part]
        for key in new:
            if old.get(key) != new[key]:
                name = key if part == "settings" else f"{part.removesuffix('s')} of {key}"
                raise UsageError(
                    f"{path} holds a sweep with {name} {_shown(old.get(key))}, and this one has {_shown(new[key])}: "
                    "their points would not be one dataset. Choose another folder with --out."
                )


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
