"""`lifetrace run`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lifetrace.errors import UsageError

from .options import GroupedCommand, option, print_trace, progress, steps_range, write_trace_report

if TYPE_CHECKING:
    from lifetrace.run_command import RunSettings


@click.command(cls=GroupedCommand, short_help="Generate, and trace every stage of it.")
@option(
    "Prompt",
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="What to continue; repeat it for a batch. `-` reads stdin.",
)
@option(
    "Prompt",
    "--prompt-file",
    "prompt_files",
    multiple=True,
    metavar="FILE",
    help="A file whose whole text is a prompt; may be repeated.",
)
@option(
    "Prompt",
    "--prompt-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Repeat or cut each prompt to exactly N tokens.",
)
@option("Prompt", "--batch", type=click.IntRange(min=1), default=1, metavar="N", help="Give each prompt N times.")
@option("Prompt", "--chat/--no-chat", default=False, help="Put the prompt through the model's chat template.")
@option(
    "Model", "--model", default="demo", metavar="NAME", help="A hub id, a folder, a .gguf file, or the embedded `demo`."
)
@option("Model", "--revision", metavar="REV", help="Branch, tag or commit of a hub model.")
@option(
    "Model",
    "--weights",
    type=click.Choice(["trained", "random"]),
    default="trained",
    help="`random` needs only the config: speed does not depend on the values.",
)
@option(
    "Model",
    "--config",
    "config_file",
    metavar="FILE",
    help="With --weights random: the config.json of the architecture.",
)
@option(
    "Model",
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    help="auto: as stored; float32 on a CPU.",
)
@option("Model", "--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N. auto: CUDA if there.")
@option(
    "Model", "--device-map", metavar="MAP", help="Spread the model over devices: auto, or JSON of module to device."
)
@option(
    "Model",
    "--attn-implementation",
    "attention",
    metavar="NAME",
    help="eager, sdpa, flash_attention_2, …  [default: the model's]",
)
@option(
    "Model",
    "--trust-remote-code",
    is_flag=True,
    help="Run code that the model's repository brings. Only if you trust it.",
)
@option(
    "Generation",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    metavar="N",
    help="Tokens to generate at most.",
)
@option(
    "Generation",
    "--sample/--greedy",
    "sample",
    default=None,
    help="Draw tokens at random, or take the likeliest.  [default: the model's]",
)
@option(
    "Generation",
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    metavar="T",
    help="Flatten (above 1) or sharpen the distribution. Implies --sample.",
)
@option(
    "Generation",
    "--top-k",
    type=click.IntRange(min=1),
    metavar="K",
    help="Draw among the K likeliest tokens. Implies --sample.",
)
@option(
    "Generation",
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="P",
    help="Draw among the likeliest tokens that make up P. Implies --sample.",
)
@option("Generation", "--num-beams", type=click.IntRange(min=1), metavar="N", help="Beam search with N beams.")
@option("Generation", "--seed", type=int, default=0, metavar="N", help="Seed of every generate.")
@option(
    "Generation",
    "--cache-implementation",
    "cache",
    metavar="NAME",
    help="dynamic, static, offloaded, quantized, …  [default: the model's]",
)
@option(
    "Generation",
    "--no-kv-cache",
    is_flag=True,
    help="Recompute all positions at each step, to see what the cache saves.",
)
@option(
    "Generation",
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other setting of generate(), such as repetition_penalty=1.1.",
)
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
    "Recording",
    "--ops",
    is_flag=True,
    help="Also profile the operators and kernels of a few steps, in a pass of its own.",
)
@option(
    "Recording",
    "--memory/--no-memory",
    default=True,
    help="Also generate once more, untimed, to see what memory is held for.",
)
@option(
    "Recording",
    "--logprobs",
    type=click.IntRange(min=1),
    metavar="K",
    help="Also record log-probability, entropy and the K likeliest tokens.",
)
@option(
    "Recording",
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    metavar="N",
    help="Generate N times first, unrecorded.",
)
@option(
    "Recording",
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    metavar="N",
    help="Trace the same generate N times.",
)
@option(
    "Recording",
    "--baseline/--no-baseline",
    default=True,
    help="Also generate untraced in turn, to show what tracing costs and that tokens agree.",
)
@option(
    "Output",
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the trace.  [default: traces/<time>-<model>]",
)
@option("Output", "--force", is_flag=True, help="Replace a trace that is in the folder.")
@option("Output", "--report/--no-report", default=True, help="Write report.html into the trace.")
@option("Output", "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def run(as_json: bool, report: bool, **given: Any) -> None:
    """Generate from a prompt and trace every stage of it.

    Without options the embedded model continues a sentence; nothing is downloaded. The text and a
    table of where the time went go to stdout, progress to stderr, everything recorded into a folder
    of Parquet files with a report.
    """
    settings = _run_settings(given)
    from lifetrace import run_command

    path = run_command.run(settings, progress)
    progress("")
    report_path = write_trace_report(path) if report else None
    print_trace(path, report_path, as_json)


def _run_settings(given: dict[str, Any]) -> "RunSettings":
    from lifetrace.run_command import RunSettings
    from lifetrace.session import Options
    from lifetrace.workload import ModelSource, Prompts, parse_settings

    if given["config_file"] and given["weights"] != "random":
        raise UsageError("--config describes a model without weights; add --weights random.")
    texts = _prompt_texts(given["prompts"], given["prompt_files"])
    return RunSettings(
        source=ModelSource(
            model=given["model"],
            revision=given["revision"],
            random_weights=given["weights"] == "random",
            config_file=given["config_file"],
            dtype=given["dtype"],
            device=given["device"],
            device_map=given["device_map"],
            attention=given["attention"],
            trust_remote_code=given["trust_remote_code"],
        ),
        prompts=Prompts(
            tuple(text for text in texts for _ in range(given["batch"])), given["chat"], given["prompt_length"]
        ),
        options=Options(given["detail"], given["every"], *given["steps"]),
        max_new_tokens=given["max_new_tokens"],
        generation=_generation(given) | parse_settings(given["pairs"]),
        seed=given["seed"],
        warmup=given["warmup"],
        repeats=given["repeats"],
        baseline=given["baseline"],
        logprobs=given["logprobs"],
        ops=given["ops"],
        memory=given["memory"],
        out=given["out"],
        force=given["force"],
    )


def _prompt_texts(prompts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
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


def _generation(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of generate() that have options of their own, where they were given."""
    settings: dict[str, Any] = {}
    drawing = ("temperature", "top_k", "top_p")
    for name in (*drawing, "num_beams"):
        if given[name] is not None:
            settings[name] = given[name]
    implied = any(given[name] is not None for name in drawing)
    if given["sample"] is False and implied:
        raise UsageError("--greedy takes the likeliest token; --temperature, --top-k and --top-p need --sample.")
    if given["sample"] is not None or implied:
        settings["do_sample"] = bool(given["sample"] or implied)
    if given["cache"] is not None:
        settings["cache_implementation"] = given["cache"]
    if given["no_kv_cache"]:
        settings["use_cache"] = False
    return settings
