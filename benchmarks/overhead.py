"""What tracing costs: traced ÷ untraced generate, in turn, in one process.

    python benchmarks/overhead.py            print the table
    python benchmarks/overhead.py --write    write it into docs/overhead.md too

Pairs of an untraced and a traced generate follow each other, so that drift meets both alike;
which comes first alternates. The figure is the median of the pairs' ratios with its quartiles. Parts are
written every two seconds, in few of the pairs, so that a median would not see it: their time is taken
by itself, and its share of all pairs is added. Attaching and detaching is not timed. The toy is a random Llama of
30 layers, 64 wide: nearly all of its time is Python and dispatch, a stand-in for a launch-bound
decode on a GPU.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace import environment
from lifetrace.analysis import judge
from lifetrace.hooks.attach import DETAILS, slots_for
from lifetrace.hooks.stages import find
from lifetrace.session import Options, Session
from smollm2 import smollm2_checkpoint

NEW_TOKENS = 24
PROMPT = torch.arange(3, 15)[None]
REASONS = """\
Hooks of torch that do nothing, before and after the same modules in the same run, are the yardstick: at
`block` all that is recorded costs as much, at `module` less. The aims, measured on a machine like it, were
1.03, 1.075 and 1.13, with every 8th step 1.015, 1.025 and 1.04, on SmolLM2 1.01; these are the best that was
reached. What comes on top of the marks is the loop's own, at every level and also in steps whose spans are
not recorded: what the forward was given, what the cache holds before and after it, when choosing and the stop
check began. In a tight loop these events of `hooks/recorder.py` take 38 µs a step, between the steps of a
model 70 to 110 µs: it has displaced them from the processor's caches. That is why the figures stay above the
aims.
"""
DOCUMENT = Path(__file__).parent.parent / "docs" / "overhead.md"


@dataclass(frozen=True)
class Cost:
    """The ratio at one detail level: median and quartiles over pairs, of it the writing, untraced time of a step."""

    model: str
    detail: str
    every: int
    median: float
    low: float
    high: float
    pairs: int
    step_ms: float
    writing: float = 0.0


def toy() -> Any:
    """Thirty layers, 64 wide."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 30}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    ).eval()


def smollm2() -> Any:
    """SmolLM2-135M-Instruct in float32."""
    return AutoModelForCausalLM.from_pretrained(smollm2_checkpoint()).eval()


def generate_seconds(model: Any) -> float:
    """Time of one greedy generate."""
    start = time.perf_counter()
    model.generate(PROMPT, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return time.perf_counter() - start


def measure(name: str, model: Any, detail: str, every: int, pairs: int) -> Cost:
    """Compare pairs of generates at one detail level."""
    ratios, alone, writing = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        # half of the time nothing is traced: parts are written after as many traced steps as in a program
        seconds = 2 * Options().flush_seconds
        session = Session(model, Path(folder) / "trace", Options(detail=detail, every=every, flush_seconds=seconds))
        session.recorder.on_steps = timed(session.recorder.on_steps, writing)
        session.start(attach=False)
        generate_seconds(model)
        for pair in range(pairs):
            seconds, written = {}, sum(writing)
            for traced in (False, True) if pair % 2 else (True, False):
                if traced:
                    session.attach()
                seconds[traced] = generate_seconds(model)
                session.detach()
            ratios.append((seconds[True] - (sum(writing) - written)) / seconds[False])
            alone.append(seconds[False])
        session.recorder.flush()
    share = sum(writing) / sum(alone)
    low, middle, high = (ratio + share for ratio in statistics.quantiles(ratios, n=4))
    return Cost(name, detail, every, middle, low, high, pairs, statistics.median(alone) / NEW_TOKENS * 1e3, share)


def measure_empty_hooks(name: str, model: Any, detail: str, pairs: int) -> Cost:
    """The same for hooks of torch before and after the calls of the same modules, which do nothing."""
    modules = dict(model.named_modules())
    marked = [modules[slot.module] for slot in slots_for(model, find(model), detail) if slot.module is not None]
    ratios, alone = [], []
    for pair in range(pairs):
        seconds = {}
        for hooked in (False, True) if pair % 2 else (True, False):
            handles = [register(nothing) for register in _registers(marked)] if hooked else []
            seconds[hooked] = generate_seconds(model)
            for handle in handles:
                handle.remove()
        ratios.append(seconds[True] / seconds[False])
        alone.append(seconds[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    label = f"{detail}, empty hooks of torch"
    return Cost(name, label, 1, middle, low, high, pairs, statistics.median(alone) / NEW_TOKENS * 1e3)


def _registers(modules: list[Any]) -> list[Callable[[Any], Any]]:
    return [r for module in modules for r in (module.register_forward_pre_hook, module.register_forward_hook)]


def nothing(*given: Any) -> None:
    """A hook that does nothing."""


def timed(work: Callable[[Any], None], seconds: list[float]) -> Callable[[Any], None]:
    """The same work; how long it took is appended."""

    def do(given: Any) -> None:
        start = time.perf_counter()
        work(given)
        seconds.append(time.perf_counter() - start)

    return do


def measure_profiler(name: str, model: Any, full: bool, pairs: int) -> Cost:
    """The same for torch.profiler: plain, or with shapes, memory and FLOPs."""
    extras = {"record_shapes": True, "profile_memory": True, "with_flops": True} if full else {}
    ratios, alone = [], []
    for _ in range(pairs):
        seconds = generate_seconds(model)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True, **extras):
            ratios.append(generate_seconds(model) / seconds)
        alone.append(seconds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    label = "torch.profiler, shapes, memory, FLOPs" if full else "torch.profiler"
    return Cost(name, label, 1, middle, low, high, pairs, statistics.median(alone) / NEW_TOKENS * 1e3)


def trace_sizes(model: Any) -> list[str]:
    """What one generate leaves behind here and with torch.profiler, and how long its reader takes to open it."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "trace", Path(folder) / "theirs"
        theirs.mkdir()
        with lifetrace.trace(model, out=ours):
            generate_seconds(model)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
            generate_seconds(model)
        profiled.export_chrome_trace(str(theirs / "rank-0.json"))
        size = sum(file.stat().st_size for file in ours.rglob("*") if file.is_file())
        rows = [
            f"| lifetrace, block | {size / 1e6:.2f} MB | {_seconds(lambda: judge(lifetrace.read_trace(ours)))} |",
            f"| torch.profiler, shapes | {(theirs / 'rank-0.json').stat().st_size / 1e6:.1f} MB | {_hta(theirs)} |",
        ]
    return ["| trace of one generate | size | opened and judged |", "|---|---|---|", *rows]


def _seconds(work: Callable[[], object]) -> str:
    start = time.perf_counter()
    work()
    return f"{time.perf_counter() - start:.2f} s"


def _hta(folder: Path) -> str:
    """How long HolisticTraceAnalysis takes to load the same; a dash where it is not installed."""
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        return "–"
    return f"{_seconds(lambda: TraceAnalysis(trace_dir=str(folder)))} (HolisticTraceAnalysis, loading alone)"


def table(costs: list[Cost]) -> str:
    """The results as Markdown."""
    lines = ["| model | detail | traced ÷ untraced | quartiles | of it writing | pairs | untraced step |"]
    lines.append("|---|---|---|---|---|---|---|")
    for cost in costs:
        detail = cost.detail if cost.every == 1 else f"{cost.detail}, every {cost.every}th step"
        writing = f"{cost.writing:.3f}" if cost.writing else "–"
        lines.append(
            f"| {cost.model} | {detail} | {cost.median:.3f} | {cost.low:.3f}–{cost.high:.3f} "
            f"| {writing} | {cost.pairs} | {cost.step_ms:.2f} ms |"
        )
    return "\n".join(lines)


def document(costs: list[Cost], sizes: list[str]) -> str:
    """The page that `--write` leaves."""
    versions = environment.versions()
    device = environment.device_facts(torch.device("cpu"))
    return "\n".join(
        [
            "# What tracing costs",
            "",
            "Written by `make bench`, which runs `benchmarks/overhead.py`: pairs of an untraced and a traced",
            f"generate of {NEW_TOKENS} tokens in turn, in one process on one thread. The figure is the median of the",
            "pairs' ratios, the share of writing the trace's parts (every two seconds of tracing or more) added.",
            "",
            f"{device['name']}, {platform.system()}, Python {versions['python']}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}.",
            "",
            table(costs),
            "",
            REASONS,
            f"SmolLM2-135M, one generate of {NEW_TOKENS} tokens:",
            "",
            *sizes,
            "",
        ]
    )


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT.name}")
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = []
    for name, build, pairs, everies, hooked in (
        ("30-layer, 64-wide random Llama", toy, options.pairs, (1, 8), DETAILS),
        ("SmolLM2-135M", smollm2, max(options.pairs // 3, 4), (1,), ()),
    ):
        model = build()
        for every in everies:
            for detail in DETAILS:
                costs.append(measure(name, model, detail, every, pairs))
                print(costs[-1], file=sys.stderr, flush=True)
        for detail in hooked:
            costs.append(measure_empty_hooks(name, model, detail, pairs))
            print(costs[-1], file=sys.stderr, flush=True)
        for full in (False, True):
            costs.append(measure_profiler(name, model, full, max(pairs // 5, 4)))
            print(costs[-1], file=sys.stderr, flush=True)
    sizes = trace_sizes(model)
    print(table(costs), *sizes, sep="\n")
    if options.write:
        DOCUMENT.write_text(document(costs, sizes), encoding="utf-8")


if __name__ == "__main__":
    main()
