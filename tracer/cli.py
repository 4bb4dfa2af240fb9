"""The command line: the group of commands, and how errors leave it."""

import errno
import os
import sys
from importlib.metadata import version
from typing import Any

import click

from .commands.calibrate import calibrate
from .commands.compare import compare
from .commands.exec import exec_
from .commands.explain import explain
from .commands.export import export
from .commands.plan import plan
from .commands.report import report
from .commands.run import run
from .commands.show import show
from .commands.sweep import sweep
from .errors import LifetraceError

# Commands that read what a stranger may have sent.
READING = ("show", "explain", "compare", "report", "export")
UNEXPECTED = "could not make sense of this trace"
SHOW_TRACEBACK = "LIFETRACE_TRACEBACK"


class Lifetrace(click.Group):
    """The group of commands; turns lifetrace's errors into a sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal that knows no dash still gets the rest
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except LifetraceError as error:
            click.echo(f"lifetrace: {_one_line(str(error))}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("lifetrace: interrupted.", err=True)
            ctx.exit(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                click.echo("lifetrace: the output could not be written: its disk is full.", err=True)
                ctx.exit(1)
            if ctx.invoked_subcommand not in READING or os.environ.get(SHOW_TRACEBACK):
                raise
            what = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            click.echo(
                f"lifetrace: {ctx.invoked_subcommand} {UNEXPECTED} ({_one_line(what)}). It is damaged, or this is a "
                f"bug of lifetrace: {SHOW_TRACEBACK}=1 shows where.",
                err=True,
            )
            ctx.exit(2)


def _one_line(text: str) -> str:
    """The text as one line that does not steer the terminal: a path or a message may come from a stranger."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


@click.group(cls=Lifetrace, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("lifetrace-llm"), prog_name="lifetrace")
@click.pass_context
def main(context: click.Context) -> None:
    """Trace how a Hugging Face language model generates, step by step, and see where the time goes.

    \b
    lifetrace run --prompt "The physical hardware limits"
    lifetrace show traces/<run>
    lifetrace report traces/<run>
    """
    if context.invoked_subcommand != "exec":  # whose program is not ours to set up
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


for command in (run, exec_, show, explain, compare, report, export, calibrate, plan, sweep):
    main.add_command(command)
