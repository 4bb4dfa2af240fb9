"""`lifetrace exec`."""

import atexit
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click

from lifetrace.errors import LifetraceError, UsageError

from .options import GroupedCommand, option, steps_range, write_trace_report


@click.command(
    "exec",
    cls=GroupedCommand,
    short_help="Run a Python program and trace every generate in it.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@option("Program", "-m", "is_module", is_flag=True, help="The program is a module, as for python -m.")
@option(
    "Recording",
    "--detail",
    type=click.Choice(["layer", "block", "module"]),
    default="block",
    help="Whole layers; with norm, attention, MLP; or every module.",
)
@option(
    "Recording",
    "--every",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Record the spans of each Nth step only.",
)
@option("Recording", "--steps", callback=steps_range, metavar="A:B", help="Record the spans of steps A to B-1 only.")
@option(
    "Output",
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the trace; further models get DIR-2, ….  [default: traces/<time>-<model>]",
)
@option("Output", "--force", is_flag=True, help="Replace a trace that is in the folder.")
@option("Output", "--report/--no-report", default=True, help="Write report.html into each trace.")
@option("Output", "--strict", is_flag=True, help="Exit with 1 where lifetrace itself failed and the program did not.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [ARGUMENTS]...")
def exec_(is_module: bool, program: tuple[str, ...], report: bool, **given: Any) -> None:
    """Run a Python program unchanged and trace every generate of every causal language model in it.

    The program's output, exit code, signals and `__main__` are as without lifetrace; what it is
    told stands after its name. When it ends, a line on stderr says where the traces lie.

    \b
    lifetrace exec chat.py --model my-model
    lifetrace exec --detail layer -m my_package.serve
    """
    from lifetrace.everywhere import trace_all

    if not program:
        raise UsageError("There is no program to run; give a script, or a module with -m.")
    _check_folder(given["out"], given["force"])
    tracing = trace_all(**given)
    tracing.command = shlex.join(["lifetrace", *sys.argv[1:]])
    ended: list[BaseException] = []
    tracing.__enter__()
    # Registered first, so it runs last: after the program's own threads and exit functions have ended.
    atexit.register(_close, tracing, ended, report, os.getpid())
    _run(is_module, program, ended)


def _check_folder(out: Path | None, force: bool) -> None:
    """Refuse a folder that holds something before the program runs, with nothing imported that it has not asked for.

    Of several processes the first one decides; what they write beside each other is theirs.
    """
    is_later_rank = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    if out is None or not out.exists() or is_later_rank:
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file; give --out the name of a folder.")
    try:
        names = [file.name for file in out.iterdir()]
    except OSError as error:
        raise UsageError(f"The folder {out} cannot be read: {error.strerror}. Choose another with --out.") from None
    if not force and any(not name.startswith((".", "rank-")) for name in names):
        raise UsageError(f"The folder {out} is not empty; choose another with --out, or add --force.")


def _run(is_module: bool, program: tuple[str, ...], ended: list[BaseException]) -> None:
    from lifetrace.program import print_error, run_module, run_script

    try:
        if is_module:
            run_module(program[0], program[1:])
        else:
            run_script(Path(program[0]), program[1:])
    except UsageError as error:
        ended.append(error)
        raise
    except SystemExit as error:
        ended += [error] if error.code not in (None, 0) else []
        raise
    except KeyboardInterrupt as error:
        ended.append(error)
        print_error(error)
        sys.exit(130)
    except BaseException as error:  # noqa: BLE001 - the program's own; shown as Python shows it
        ended.append(error)
        print_error(error)
        sys.exit(1)


def _close(tracing: Any, ended: list[BaseException], report: bool, pid: int) -> None:
    """End the traces, say where they lie, and die of an interrupt as Python does, so that a shell sees it."""
    if os.getpid() != pid:  # a fork of the program that ends by itself
        return
    error = ended[0] if ended else None
    _end_traces(tracing, error, report)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if tracing.strict and tracing.faults and error is None:
        os._exit(1)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _end_traces(tracing: Any, error: BaseException | None, report: bool) -> None:
    tracing.close(error if not isinstance(error, SystemExit) else None)
    for note in tracing.notes:
        click.echo(f"lifetrace: {note}", err=True)
    if not tracing.paths:
        if not isinstance(error, UsageError):
            click.echo("lifetrace: this program came to no generate() that can be traced.", err=True)
        return
    calls = tracing.calls
    click.echo(f"lifetrace: traced {calls} call{'s' * (calls != 1)} of generate()", err=True)
    for path in tracing.paths:
        click.echo(f"lifetrace: {_with_report(path) if report else path}", err=True)


def _with_report(path: Path) -> Path:
    try:
        return write_trace_report(path)
    except LifetraceError as fault:
        click.echo(f"lifetrace: {fault}", err=True)
        return path
