"""A traced model under load: many steps, many threads, many traces; and what the process takes meanwhile."""

import gc
import os
import threading
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace.hooks.memory import rss_bytes
from lifetrace.session import Options, Session
from reference_model import R_SIZES


@dataclass(frozen=True)
class Taken:
    """What the process takes after so many steps or traces, and the processor's time for each since the last look.

    Other programs hardly slow that time down; they may well the clock's.
    """

    done: int
    each_ms: float
    rss_bytes: int
    open_files: int
    threads: int


def small_model() -> Any:
    """One layer of the reference model: nearly all of its time is the loop's own."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**R_SIZES | {"num_hidden_layers": 1})).eval()


def open_files() -> int:
    """File handles that this process holds."""
    return len(os.listdir("/proc/self/fd"))


def many_steps(count: int, out: Path, looks: int = 10, tokens: int = 200) -> list[Taken]:
    """Trace generates of so many tokens until so many steps are done; look at the process between them."""
    model, prompt = small_model(), torch.arange(3, 15)[None]
    taken = []
    with lifetrace.trace(model, out=out, strict=True) as trace:
        for look in range(looks):
            times = []
            for _ in range(count // looks // tokens):
                start = time.process_time()
                model.generate(prompt, max_new_tokens=tokens, do_sample=False)
                times.append((time.process_time() - start) * 1e3 / tokens)
            gc.collect()
            taken.append(_taken((look + 1) * (count // looks), median(times)))
    steps = trace.steps
    assert steps.step.tolist() == list(range(count // looks // tokens * tokens * looks))
    assert steps.flops.notna().all()
    return taken


def bytes_of_a_step(count: int, out: Path, tokens: int = 200) -> float:
    """What Python objects a traced run keeps of each of so many steps, after as many before them."""
    model, prompt = small_model(), torch.arange(3, 15)[None]
    session = Session(model, out, Options())
    session.start()

    def run() -> int:
        for _ in range(count // tokens):
            model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        session.recorder.flush()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    run()
    tracemalloc.start()
    try:
        return (-run() + run()) / count
    finally:
        tracemalloc.stop()
        session.finish("interrupted")


def many_threads(count: int, out: Path, tokens: int = 16) -> list[str]:
    """Generate in so many threads at once on one traced model; say what came out other than alone."""
    model = small_model()
    prompts = [torch.arange(3, 8 + number)[None] for number in range(count)]
    alone = [model.generate(prompt, max_new_tokens=tokens, do_sample=False) for prompt in prompts]
    found: dict[int, torch.Tensor] = {}
    ready = threading.Barrier(count)

    def work(number: int) -> None:
        ready.wait()
        found[number] = model.generate(prompts[number], max_new_tokens=tokens, do_sample=False)

    with lifetrace.trace(model, out=out, strict=True) as trace:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wrong = [f"thread {n} has other tokens" for n in range(count) if not torch.equal(found[n], alone[n])]
    lengths = sorted(call["prompt_tokens"][0] for call in trace.meta["calls"])
    if lengths != sorted(prompt.shape[1] for prompt in prompts):
        wrong.append(f"the calls have prompts of {lengths}")
    for call, rows in trace.steps.groupby("call"):
        ordered = rows.sort_values("step")
        if ordered.kv_len_after.diff().dropna().ne(1).any() or len(ordered) != tokens:
            wrong.append(f"the steps of call {call} are not one after another")
    top = trace.spans[trace.spans.parent.isna()].groupby("step").host_ns.sum()
    if top.tolist() != trace.steps.sort_values("step").wall_ns.tolist():
        wrong.append("stages do not add up to their steps")
    return wrong


def many_traces(count: int, folder: Path, looks: int = 10) -> list[Taken]:
    """Trace one generate so many times, each in a trace of its own, and read each; look between them."""
    model, prompt = small_model(), torch.arange(3, 15)[None]
    taken = []
    for look in range(looks):
        start = time.process_time()
        for number in range(count // looks):
            with lifetrace.trace(model, out=folder / f"{look}-{number}", detail="layer", strict=True) as trace:
                model.generate(prompt, max_new_tokens=2)
            assert len(trace.steps) == 2
        each_ms = (time.process_time() - start) * 1e3 / (count // looks)
        gc.collect()
        taken.append(_taken((look + 1) * (count // looks), each_ms))
    return taken


def many_readings(count: int, trace: Path, looks: int = 10) -> list[Taken]:
    """Open one trace so many times and read all its tables; look between them."""
    from lifetrace.analysis import schema

    taken = []
    for look in range(looks):
        start = time.process_time()
        for _ in range(count // looks):
            opened = lifetrace.read_trace(trace)
            for name in schema.TABLES:
                opened.table(name)
        gc.collect()
        each_ms = (time.process_time() - start) * 1e3 / (count // looks)
        taken.append(_taken((look + 1) * (count // looks), each_ms))
    return taken


def _taken(done: int, each_ms: float) -> Taken:
    return Taken(done, each_ms, rss_bytes() or 0, open_files(), threading.active_count())
