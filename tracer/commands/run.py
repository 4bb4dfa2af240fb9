"""`lifetrace run`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lifetrace.errors import UsageError

from .options import (
    GroupedCommand,
    detail_option,
    generate_options,
    measuring_options,
    model_options,
    model_source,
    option,
    print_trace,
    progress,
    prompt_options,
    prompt_texts,
    steps_range,
    write_trace_report,
)

if TYPE_CHECKING:
    from lifetrace.run_command import RunSettings


@click.command(cls=GroupedCommand, short_help="Generate, and trace every stage of it.")
@prompt_options
@option(
    "Prompt",
    "--prompt-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Repeat or cut each prompt to exactly N tokens.",
)
@option("Prompt", "--batch", type=click.IntRange(min=1), default=1, metavar="N", help="Give each prompt N times.")
@model_options
@option(
    "Model",
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    help="auto: as stored; float32 on a CPU.",
)
@option(
    "Model",
    "--attn-implementation",
    "attention",
    metavar="NAME",
    help="eager, sdpa, flash_attention_2, …  [default: the model's]",
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
@generate_options
@detail_option("block")
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
    "--memory-limit",
    metavar="SIZE",
    help="Run out of memory beyond this, such as 2GB, as a smaller device would, and say what would fit.",
)
@option(
    "Recording",
    "--logprobs",
    type=click.IntRange(min=1),
    metavar="K",
    help="Also record log-probability, entropy and the K likeliest tokens.",
)
@measuring_options
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
    from lifetrace.plan_subject import parse_bytes
    from lifetrace.run_command import RunSettings
    from lifetrace.session import Options
    from lifetrace.workload import Prompts, parse_settings

    texts = prompt_texts(given["prompts"], given["prompt_files"])
    return RunSettings(
        source=model_source(given, given["dtype"], given["attention"]),
        prompts=Prompts(
            tuple(text for text in texts for _ in range(given["batch"])), given["chat"], given["prompt_length"]
        ),
        options=Options(given["detail"], given["every"], *given["steps"]),
        max_new_tokens=given["max_new_tokens"],
        generation=_with_pairs(_generation(given), parse_settings(given["pairs"]), given["sample"] is not None),
        seed=given["seed"],
        warmup=given["warmup"],
        repeats=given["repeats"],
        baseline=given["baseline"],
        logprobs=given["logprobs"],
        ops=given["ops"],
        memory=given["memory"],
        memory_limit_bytes=parse_bytes(given["memory_limit"]) if given["memory_limit"] else None,
        out=given["out"],
        force=given["force"],
    )


def _with_pairs(own: dict[str, Any], pairs: dict[str, Any], sample_given: bool) -> dict[str, Any]:
    """Settings of options and of `--set` together: what an option gave, rather than implied, is given once."""
    if "max_new_tokens" in pairs:
        raise UsageError("--set max_new_tokens is what --max-new-tokens is for; give that.")
    implied = set() if sample_given else {"do_sample"}
    both = sorted((own.keys() & pairs.keys()) - implied)
    if both:
        raise UsageError(f"{', '.join(both)} is given by an option and by --set; give it once.")
    return own | pairs


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
