"""What the commands share: options under headings, progress on stderr, the summary on stdout."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lifetrace.errors import UsageError

if TYPE_CHECKING:
    from lifetrace.workload import ModelSource


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of options under its heading, in the order in which they are declared."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class GroupedOption(click.Option):
    """An option that knows under which heading it stands."""

    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def option(group: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    """Declare an option under a heading, with its default in the help."""
    settings.setdefault("show_default", settings.get("default") is not None and not settings.get("is_flag"))
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def together(*several: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Declare several options, in this order."""

    def declare(command: Any) -> Any:
        for one in reversed(several):
            command = one(command)
        return command

    return declare


# -- what `run` and `sweep` are both told ----------------------------------------------------------

prompt_options = together(
    option(
        "Prompt",
        "--prompt",
        "prompts",
        multiple=True,
        metavar="TEXT",
        help="What to continue; repeat it for a batch. `-` reads stdin.",
    ),
    option(
        "Prompt",
        "--prompt-file",
        "prompt_files",
        multiple=True,
        metavar="FILE",
        help="A file whose whole text is a prompt; may be repeated.",
    ),
    option("Prompt", "--chat/--no-chat", default=False, help="Put the prompt through the model's chat template."),
)

model_options = together(
    option(
        "Model",
        "--model",
        default="demo",
        metavar="NAME",
        help="A hub id, a folder, a .gguf file, or the embedded `demo`.",
    ),
    option("Model", "--revision", metavar="REV", help="Branch, tag or commit of a hub model."),
    option(
        "Model",
        "--weights",
        type=click.Choice(["trained", "random"]),
        default="trained",
        help="`random` needs only the config: speed does not depend on the values.",
    ),
    option(
        "Model",
        "--config",
        "config_file",
        metavar="FILE",
        help="With --weights random: the config.json of the architecture.",
    ),
    option(
        "Model", "--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N. auto: CUDA if there."
    ),
    option(
        "Model", "--device-map", metavar="MAP", help="Spread the model over devices: auto, or JSON of module to device."
    ),
    option(
        "Model",
        "--trust-remote-code",
        is_flag=True,
        help="Run code that the model's repository brings. Only if you trust it.",
    ),
    option(
        "Model",
        "--pickled-weights",
        is_flag=True,
        help="Also take weights that are pickled, where there are no safetensors; as weights only.",
    ),
)

generate_options = together(
    option("Generation", "--seed", type=int, default=0, metavar="N", help="Seed of every generate."),
    option(
        "Generation",
        "--set",
        "pairs",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other setting of generate(), such as repetition_penalty=1.1.",
    ),
)

measuring_options = together(
    option(
        "Recording",
        "--memory/--no-memory",
        default=True,
        help="Also generate once more, untimed, to see what memory is held for.",
    ),
    option(
        "Recording",
        "--warmup",
        type=click.IntRange(min=0),
        default=1,
        metavar="N",
        help="Generate N times first, unrecorded.",
    ),
    option(
        "Recording",
        "--repeats",
        type=click.IntRange(min=1),
        default=3,
        metavar="N",
        help="Trace the same generate N times.",
    ),
    option(
        "Recording",
        "--baseline/--no-baseline",
        default=True,
        help="Also generate untraced in turn, to show what tracing costs and that tokens agree.",
    ),
)


def detail_option(default: str) -> Callable[[Any], Any]:
    """How deep to record."""
    return option(
        "Recording",
        "--detail",
        type=click.Choice(["layer", "block", "module"]),
        default=default,
        help="Whole layers; with norm, attention, MLP; or every module.",
    )


def model_source(given: dict[str, Any], dtype: str, attention: str | None) -> "ModelSource":
    """The model that the options name.

    Raises:
        UsageError: a config was given for weights that are trained.
    """
    from lifetrace.workload import ModelSource

    if given["config_file"] and given["weights"] != "random":
        raise UsageError("--config describes a model without weights; add --weights random.")
    return ModelSource(
        model=given["model"],
        revision=given["revision"],
        random_weights=given["weights"] == "random",
        config_file=given["config_file"],
        dtype=dtype,
        device=given["device"],
        device_map=given["device_map"],
        attention=attention,
        trust_remote_code=given["trust_remote_code"],
        pickled_weights=given["pickled_weights"],
    )


def prompt_texts(prompts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    """The prompts in full, `-` read from stdin and files from disk; the example where none is given."""
    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts]
    for file in files:
        try:
            texts.append(_read_stdin() if file == "-" else Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"The prompt file {file} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise UsageError(f"The prompt file {file} is not UTF-8 text.") from None
    return texts or ["The physical hardware limits"]


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("What came on stdin is not UTF-8 text.") from None


def steps_range(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int | None]:
    """Read A:B, A: or :B."""
    if value is None:
        return 0, None
    first, colon, last = value.partition(":")
    try:
        bounds = (int(first or 0), int(last) if last else None)
    except ValueError:
        bounds = (-1, None)
    if not colon or bounds[0] < 0 or (bounds[1] is not None and bounds[1] <= bounds[0]):
        raise click.BadParameter(f"{value!r} is no range of steps; write A:B, such as 0:8, with A below B.")
    return bounds


def progress(text: str) -> None:
    """Show what goes on, on stderr: one line rewritten in a terminal, a line each elsewhere.

    No thread redraws it: a second thread would slow what is being timed.
    """
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[2K{text}", err=True, nl=False)
    elif text:
        click.echo(text, err=True)


def write_trace_report(path: Path) -> Path:
    """Write the report into a trace and return where it lies."""
    from lifetrace.analysis.report import write_report
    from lifetrace.analysis.trace import read_trace

    return write_report(read_trace(path), path / "report.html")


def print_trace(path: Path, report_path: Path | None, as_json: bool) -> None:
    """Print the summary of a trace: for people, or as one JSON document."""
    from lifetrace.analysis.summary import summarize
    from lifetrace.analysis.trace import read_trace

    summary = summarize(read_trace(path))
    if as_json:
        document = summary.to_json() | {"report": str(report_path) if report_path else None}
        click.echo(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False))
        return
    from lifetrace.analysis.console import TextConsole
    from lifetrace.analysis.terminal import print_summary

    console = TextConsole()
    print_summary(summary, console)
    click.echo(f"trace   {path}")
    if report_path is not None:
        click.echo(f"report  {report_path}")
