"""A summary as Markdown for a document, or as CSV for a spreadsheet."""

import csv
import io
from typing import Any

from . import units
from .breakdown import StageTime
from .summary import Summary
from .terminal import printable, summary_rows
from .verdict_view import bound_cell, lead_rows

CSV_COLUMNS = (
    "phase", "stage", "part", "count", "time_ns", "share", "bound", "close_to", "roof_ns", "lost_ns", "efficiency",
    "compute_ns", "memory_ns", "launch_ns", "flops", "bytes", "op_count",
)  # fmt: skip


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def markdown(summary: Summary) -> str:
    """The verdict, the headline facts and where the time went, as GitHub's Markdown."""
    lines = [f"# {_plain(str(summary.model.get('id') or summary.path))}", ""]
    lines += [f"- **{name}**: {_plain(text)}" for name, text in lead_rows(summary.verdicts)]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in summary_rows(summary)]
    lines += ["", "| phase | stage | time of a call | share | bound |", "|---|---|---:|---:|---|"]
    lines += [_stage_line(summary, row) for row in summary.stages]
    lines += [f"\n> {_plain(note)}" for note in summary.notes]
    return "\n".join(lines) + "\n"


def csv_text(summary: Summary) -> str:
    """Where the time went, a row a stage or part of each phase; a missing value is an empty field."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in summary.stages:
        writer.writerow(_csv_row(summary, row))
    return out.getvalue()


def _stage_line(summary: Summary, row: StageTime) -> str:
    found = summary.verdicts.stage(row.phase, row.stage, row.part)
    name = row.stage if row.part is None else f"{row.stage}, {row.part}"
    cells = (row.phase, _plain(name), units.time(row.time_ns), units.share(row.share), bound_cell(found))
    return f"| {' | '.join(cells)} |"


def _csv_row(summary: Summary, row: StageTime) -> dict[str, object]:
    found = summary.verdicts.stage(row.phase, row.stage, row.part)
    values: dict[str, object] = {name: _cell(getattr(row, name)) for name in CSV_COLUMNS[:6]}
    if found is None:
        return values
    work = {"flops": found.work.flops, "bytes": found.work.bytes_, "op_count": found.work.op_count}
    return values | {name: getattr(found.verdict, name) for name in CSV_COLUMNS[6:14]} | work


def _cell(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula: an apostrophe before what begins like one."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(FORMULA_STARTS) else printable(value)


def _plain(text: str) -> str:
    """Text that cannot become markup: control characters as escapes, marks of Markdown and HTML disarmed."""
    line = " ".join(printable(text).split())
    for mark in "\\`*_[]<>|#":
        line = line.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return line
