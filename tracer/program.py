"""Runs a user's program as Python itself would: its own `__main__`, arguments, path and way of ending."""

import os
import runpy
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

from lifetrace.errors import UsageError


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a file as `__main__`; what it raises goes on.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    try:
        source = script.read_bytes()
    except OSError as error:
        raise UsageError(f"The script {script} cannot be read: {error.strerror}.") from None
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(script)
    main.__spec__ = None
    vars(main)["__builtins__"] = __builtins__
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    sys.modules["__main__"] = main
    exec(compile(source, main.__file__, "exec"), vars(main))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as `python -m` does; what it raises goes on."""
    sys.argv = [name, *arguments]
    sys.path[0] = str(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def print_error(error: BaseException) -> None:
    """Show an uncaught exception as without us: the program's own hook, its own frames."""
    error.__traceback__ = own_frames(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)


def own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Leave out the frames before the program's own, which begin after this module and `runpy`."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    frames = list(traceback.walk_tb(trace))
    last = max((i for i, (frame, _) in enumerate(frames) if frame.f_code.co_filename in ours), default=-1)
    for _ in range(last + 1):
        trace = trace.tb_next if trace is not None else None
    return trace
