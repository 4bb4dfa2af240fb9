"""A run that ends at any moment, in a process of its own, and what has to be left of it."""

import errno
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fake_device import fake_ceilings
from transformers import LlamaConfig, LlamaForCausalLM

from lifetrace import calibrate, session, writer
from lifetrace.analysis import read_trace, schema
from lifetrace.analysis.gaps import CLAIM
from lifetrace.errors import LifetraceError
from lifetrace.session import Options, Session
from reference_model import R_SIZES

PROMPT = torch.arange(3, 15)[None]
NEW_TOKENS = 120
# How a run may end before its time. A truncation is what a power cut may leave of a file not yet on the disk.
ENDINGS = ("SIGKILL", "SIGTERM", "SIGINT", "truncated", "disk full", "folder removed")


@dataclass(frozen=True)
class Ended:
    """What was seen of one run: when it was struck, how it ended, and what its trace says.

    `status` is null where there was no trace yet; `wrong` says what should not be, in words.
    """

    ending: str
    after_s: float
    status: str | None
    steps: int
    wrong: list[str]


def model_r() -> Any:
    """The reference model."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()


def traced_run(model: Any, out: Path) -> torch.Tensor:
    """Two generates under a trace that writes parts all the time; a fault of lifetrace is left to the manifest."""
    recording = Session(model, out, Options(detail="layer", flush_steps=8, flush_seconds=0.02))
    recording.start()
    error: BaseException | None = None
    try:
        for _ in range(2):
            tokens = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
    except BaseException as raised:
        error = raised
        raise
    finally:
        recording.finish(session.status_of(error), error)
    return tokens


def strike(model: Any, expected: torch.Tensor, out: Path, ending: str, after_s: float, seed: int) -> Ended:
    """Run in a fork of this process, end it so, and look at what is left."""
    shutil.rmtree(out, ignore_errors=True)
    child = os.fork()
    if child == 0:
        os._exit(_child(model, expected, out, ending, seed))
    time.sleep(after_s)
    wrong = []
    if ending == "folder removed":
        shutil.rmtree(out, ignore_errors=True)
    elif ending != "disk full":
        number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(ending, signal.SIGKILL)
        os.kill(child, number)
    _, ended = os.waitpid(child, 0)
    if ending in ("disk full", "folder removed") and ended != 0:
        wrong.append(f"the program did not go on: {ended}")
    if ending == "truncated":
        _truncate(out, seed)
    return _look(out, ending, after_s, wrong)


def _child(model: Any, expected: torch.Tensor, out: Path, ending: str, seed: int) -> int:
    """What the fork does; 0 where its program came to its end with the tokens that it gives untraced."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    if ending == "disk full":
        _fill_disk(random.Random(seed).randrange(0, 90))
    try:
        return int(not torch.equal(traced_run(model, out), expected))
    except LifetraceError:
        return 0  # refused before anything ran
    except BaseException:  # noqa: BLE001 - whatever ended the program
        return 2


def _fill_disk(after_writes: int) -> None:
    """Let the disk be full after so many files, half of the last one written."""
    writes, replace = [], os.replace

    def full(source: str, target: Any) -> None:
        writes.append(target)
        if len(writes) > after_writes:
            os.truncate(source, os.path.getsize(source) // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    writer.os.replace = full


def _truncate(out: Path, seed: int) -> None:
    """Cut one of the files that were written last."""
    files = sorted((path for path in out.rglob("*.parquet")), key=lambda path: path.stat().st_mtime_ns)[-3:]
    if files:
        chosen = random.Random(seed).choice(files)
        os.truncate(chosen, random.Random(seed + 1).randrange(0, chosen.stat().st_size))


def _look(out: Path, ending: str, after_s: float, wrong: list[str]) -> Ended:
    strange = [path for path in out.rglob("*") if path.is_file() and not _known(path)]
    wrong += [f"{path.relative_to(out)} is no name of lifetrace" for path in strange]
    if not (out / writer.MANIFEST).is_file():
        if list(out.rglob("part-*.parquet")) and ending != "folder removed":
            wrong.append("there are rows and no manifest")
        return Ended(ending, after_s, None, 0, wrong)
    try:
        trace = read_trace(out)
        steps = _steps(trace, ending, wrong)
        status = trace.meta["status"]
        _check_status(status, trace.gaps, ending, wrong)
        return Ended(ending, after_s, status, steps, wrong)
    except LifetraceError as error:
        wrong.append(str(error))
        return Ended(ending, after_s, "?", 0, wrong)


def _steps(trace: Any, ending: str, wrong: list[str]) -> int:
    """Read every table; a file that was cut is named, and the rest is read without it."""
    tables = {}
    for name, table in schema.TABLES.items():
        try:
            tables[name] = trace.table(name)
        except LifetraceError as error:
            if ending not in ("truncated", "folder removed"):
                wrong.append(str(error))
            tables[name] = table.schema.empty_table()
    steps = tables["steps"]["step"].to_pylist()
    if ending == "folder removed":
        return len(steps)
    if sorted(steps) != list(range(len(steps))):
        wrong.append("steps are missing between others")
    spans = set(tables["spans"]["step"].drop_null().to_pylist())
    if ending != "truncated" and not spans <= set(steps):
        wrong.append("there are spans of steps that are not there")
    return len(steps)


def _check_status(status: str, gaps: list[str], ending: str, wrong: list[str]) -> None:
    allowed = {
        "SIGINT": ("running", "interrupted", "complete"),
        "disk full": ("running", "failed", "complete"),
        "folder removed": ("running", "failed", "complete"),
    }.get(ending, ("running", "complete"))
    if status not in allowed:
        wrong.append(f"the status is {status}")
    if status == "running" and not any("killed" in gap for gap in gaps):
        wrong.append(f"nothing says that it was killed: {gaps}")


def _known(path: Path) -> bool:
    temporary = path.name.startswith(".") and path.name.endswith(".tmp")
    return temporary or path.name in (writer.MANIFEST, CLAIM) or path.suffix == ".parquet"


def _duration_s(model: Any, expected: torch.Tensor, out: Path) -> float:
    """How long the whole run takes in a fork of this process."""
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(_child(model, expected, out, "", 0))
    assert os.waitpid(child, 0)[1] == 0
    return time.perf_counter() - start


def know_ceilings() -> None:
    """Ceilings that are there already: what is struck is a run, not a measurement of this machine."""
    device = calibrate.device_key(torch.device("cpu"))
    if calibrate.load(device)[0] is None:
        calibrate.store(replace(fake_ceilings(), device=device))


def strikes(count: int, folder: Path, seed: int = 0) -> list[Ended]:
    """End so many runs, each in the next way, each at a random moment of its life."""
    model, chance = model_r(), random.Random(seed)
    expected = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
    know_ceilings()
    traced_run(model, folder / "first")  # what is done once in a process is done before it is forked
    whole_s = min(_duration_s(model, expected, folder / f"whole-{number}") for number in range(3))
    endings = [ENDINGS[number % len(ENDINGS)] for number in range(count)]
    return [
        strike(model, expected, folder / "struck", ending, chance.uniform(0, whole_s), seed + number)
        for number, ending in enumerate(endings)
    ]
