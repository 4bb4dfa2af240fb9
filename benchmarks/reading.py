"""What reading a long trace takes: `lifetrace show` and `lifetrace report`, each a process of its own.

    python benchmarks/reading.py                     10 million spans: print the table
    python benchmarks/reading.py --write             write it into docs/reading.md too
    python benchmarks/reading.py --spans 1000000     fewer
    python benchmarks/reading.py --folder DIR        keep the trace there, or read the one that is there

The trace is made of the stored one of SmolLM2-135M at block detail, whose decode steps it repeats over an ever longer
cache with times that are none of them alike, by the tracer's own writer (`tests/support/large_trace.py`). The first
run of a command finds the files in no cache of ours; the system's is asked to forget them.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from large_trace import write_large  # noqa: E402 - it lies with the tests

DOCUMENT = ROOT / "docs" / "reading.md"
WARM_RUNS = 3
# The bounds that are held: seconds by command, and bytes of memory.
MOST_SECONDS = {"show": 5.0, "report": 15.0}
MOST_BYTES = 1_500_000_000


@dataclass(frozen=True)
class Cost:
    """One command: seconds at first, the least and the most of the others, and its largest resident memory."""

    command: str
    cold_s: float
    warm_s: list[float]
    peak_bytes: int


def measure(command: str, arguments: list[str], folder: Path) -> Cost:
    """Run a command once with the files forgotten by the system, then with them in its memory."""
    forget(folder)
    runs = [run(["lifetrace", command, *arguments]) for _ in range(1 + WARM_RUNS)]
    return Cost(command, runs[0][0], [seconds for seconds, _ in runs[1:]], max(peak for _, peak in runs))


def run(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget(folder: Path) -> None:
    """Ask the system to drop the files from its memory; where it does not, the first run is a warm one."""
    for file in folder.rglob("*.parquet"):
        handle = os.open(file, os.O_RDONLY)
        with suppress(AttributeError, OSError):
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def table(costs: list[Cost]) -> str:
    """The results as Markdown."""
    lines = ["| command | at first | then | most memory |", "|---|---|---|---|"]
    for cost in costs:
        warm = f"{min(cost.warm_s):.1f}–{max(cost.warm_s):.1f} s"
        lines.append(f"| `lifetrace {cost.command}` | {cost.cold_s:.1f} s | {warm} | {cost.peak_bytes / 1e6:,.0f} MB |")
    return "\n".join(lines)


def describe(folder: Path, page: Path) -> str:
    """What was read, and by what."""
    import pyarrow.parquet as pq

    def rows(name: str) -> int:
        return sum(pq.read_metadata(file).num_rows for file in folder.glob(f"{name}/*.parquet"))

    files = list(folder.rglob("*.parquet"))
    size = sum(file.stat().st_size for file in files)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("pyarrow", "narwhals", "plotly"))
    return (
        f"{rows('spans'):,} spans of {rows('steps'):,} steps, {rows('kv'):,} rows of the KV cache: "
        f"{size / 1e6:.0f} MB in {len(files)} files. The page has {page.stat().st_size / 1e6:.1f} MB. "
        f"{len(os.sched_getaffinity(0))} cores, {platform.system()}, Python {platform.python_version()}, {libraries}."
    )


def write_document(text: str, costs: list[Cost]) -> None:
    """Put the figures between the marks of the page."""
    page = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = page.partition("<!-- measured -->\n")
    after = rest.partition("<!-- end -->\n")[2]
    middle = f"<!-- measured -->\n{text}\n\n{table(costs)}\n<!-- end -->\n"
    DOCUMENT.write_text(before + middle + after, encoding="utf-8")


def main() -> None:
    """Make the trace, measure, print, and write where asked; exit with 1 where a bound is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT.name}")
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="of the trace, which is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, page = options.folder or Path(temporary) / "trace", Path(temporary) / "report.html"
        if not (folder / "run.json").exists():
            write_large(folder, options.spans)
        costs = [
            measure("show", [str(folder)], folder),
            measure("report", [str(folder), "-o", str(page)], folder),
        ]
        text = describe(folder, page)
    print(f"{text}\n\n{table(costs)}")
    if options.write:
        write_document(text, costs)
    missed = [c.command for c in costs if min(c.warm_s) > MOST_SECONDS[c.command] or c.peak_bytes > MOST_BYTES]
    for command in missed:
        print(f"lifetrace {command} took more than {MOST_SECONDS[command]} s or {MOST_BYTES / 1e9} GB", file=sys.stderr)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
