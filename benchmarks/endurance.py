"""What lifetrace withstands, at length: each is a test in its short form.

    python benchmarks/endurance.py kills          200 runs ended at random moments
    python benchmarks/endurance.py fuzz           10,000 damaged traces read
    python benchmarks/endurance.py steps          200,000 decode steps in one trace
    python benchmarks/endurance.py threads        64 threads generating at once on one model
    python benchmarks/endurance.py traces         1,000 traces recorded and read one after another
    python benchmarks/endurance.py open           one trace opened and read 1,000 times
    python benchmarks/endurance.py all

Each takes --count and --seed, prints its figures as Markdown, and exits with 1 where something is wrong.
"""

import argparse
import atexit
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = str(ROOT / "tests" / "support")
sys.path.insert(0, SUPPORT)
os.environ["PYTHONPATH"] = os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])  # for processes of our own
CACHE = "LIFETRACE_ENDURANCE_CACHE"  # made once: what this process spawns imports this file again
if CACHE not in os.environ:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="lifetrace-endurance-")
    atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
os.environ["LIFETRACE_CACHE"] = os.environ[CACHE]
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Drift that is allowed between the first looks and the last: of time, and of memory in bytes for each step or trace.
MAX_SLOWER = 1.25
MAX_GROWTH_BYTES = 1000


def kills(count: int, seed: int, folder: Path) -> list[str]:
    """End runs in every way at random moments."""
    import killing

    ended = killing.strikes(count, folder, seed)
    kinds = Counter((one.ending, one.status or "no trace yet") for one in ended)
    print("| ended by | status of what is left | runs |\n|---|---|---|")
    for (ending, status), runs in sorted(kinds.items()):
        print(f"| {ending} | {status} | {runs} |")
    return [f"{one.ending} after {one.after_s:.3f} s: {what}" for one in ended for what in one.wrong]


def fuzz(count: int, seed: int, folder: Path) -> list[str]:
    """Read damaged traces with every command."""
    import hostile
    from hypothesis import HealthCheck, Phase, given, settings, strategies
    from hypothesis import seed as seeded
    from reader import reader

    traces = hostile.whole_traces(folder)
    wrong: dict[str, str] = {}
    read: Counter[str] = Counter()
    with reader() as child:

        @seeded(seed)
        @settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategies.data())
        def each(data: strategies.DataObject) -> None:
            damaged = folder / "damaged"
            how = hostile.damaged(data.draw, data.draw(strategies.sampled_from(traces)), damaged)
            command = data.draw(strategies.sampled_from(hostile.COMMANDS))
            read[command] += 1
            fault = child.fault_of(command, damaged, folder)
            if fault is not None:
                wrong.setdefault(fault.strip().splitlines()[-1][:200], f"{command}: {how}: {fault}")

        each()
        print("| command | damaged traces |\n|---|---|")
        for command, number in sorted(read.items()):
            print(f"| {command} | {number} |")
        print(f"\nmost memory: {child.largest_rss_bytes / 1e6:.0f} MB")
    return list(wrong.values())


def steps(count: int, seed: int, folder: Path) -> list[str]:
    """Record many steps in one trace."""
    import load

    know_ceilings()
    return _drift(load.many_steps(count, folder / "trace"), "step")


def threads(count: int, seed: int, folder: Path) -> list[str]:
    """Generate in many threads at once."""
    import load

    know_ceilings()
    wrong = load.many_threads(count, folder / "trace")
    print(f"{count} threads at once on one traced model: {'as alone' if not wrong else 'other than alone'}")
    return wrong


def traces(count: int, seed: int, folder: Path) -> list[str]:
    """Record many traces, one after another."""
    import load

    know_ceilings()
    return _drift(load.many_traces(count, folder), "trace", 20_000)


def open_(count: int, seed: int, folder: Path) -> list[str]:
    """Read one trace many times."""
    import load

    return _drift(load.many_readings(count, ROOT / "sample_traces" / "demo"), "trace", 20_000)


def know_ceilings() -> None:
    """Ceilings that are there already, so that no trace measures this machine when it ends."""
    import killing

    killing.know_ceilings()


def _drift(taken: list, what: str, growth_bytes: int = MAX_GROWTH_BYTES) -> list[str]:
    """Print what the process took, and say what grew; the first look is left out, for caches fill then."""
    print(f"| {what}s | ms each | resident memory | open files | threads |\n|---|---|---|---|---|")
    for look in taken:
        print(
            f"| {look.done:,} | {look.each_ms:.3f} | {look.rss_bytes / 1e6:.1f} MB "
            f"| {look.open_files} | {look.threads} |"
        )
    first, last = taken[1], taken[-1]
    growth = (last.rss_bytes - first.rss_bytes) / (last.done - first.done)
    print(f"\nmemory: {growth:.0f} bytes more for each {what}")
    found = {
        f"a {what} takes {last.each_ms / first.each_ms:.2f} times as long": last.each_ms > MAX_SLOWER * first.each_ms,
        f"memory grows by {growth:.0f} bytes a {what}": growth > growth_bytes,
        f"open files went from {first.open_files} to {last.open_files}": last.open_files > first.open_files,
        f"threads went from {first.threads} to {last.threads}": last.threads > first.threads,
    }
    return [words for words, is_wrong in found.items() if is_wrong]


WAYS: dict[str, tuple[Callable[[int, int, Path], list[str]], int]] = {
    "kills": (kills, 200),
    "fuzz": (fuzz, 10_000),
    "steps": (steps, 200_000),
    "threads": (threads, 64),
    "traces": (traces, 1_000),
    "open": (open_, 1_000),
}


def main() -> None:
    """Run what was asked for and exit with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=[*WAYS, "all"])
    parser.add_argument("--count", type=int, help="how many, in place of the long form's own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = []
    for name in WAYS if options.way == "all" else [options.way]:
        work, count = WAYS[name]
        print(f"\n## {name}\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            wrong += work(options.count or count, options.seed, Path(folder))
    shutil.rmtree(os.environ["LIFETRACE_CACHE"], ignore_errors=True)
    for what in wrong:
        print(f"\nwrong: {what}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
