"""One HTML file that tells a trace: self-contained, no request to any network, nothing in it executed.

The page's words and tables are rendered here (`report_words`, `report_verdict`); its moving parts
(the lifecycle map, the chosen step, the tokens) are drawn by `report.js` from one block of packed
arrays (`report_data`); the charts are those of `figures`. Whatever a trace holds as text is shown as
text: jinja2 escapes it in the page, `json_block` in the data, and the script sets it by
`textContent` only.
"""

from functools import cache
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from . import blocks, report_head, report_words, units
from .files import replacing
from .kv_form import kv_form
from .kv_use import kv_use
from .latency import latency
from .memory import memory, predicted
from .operators import OperatorTime, operators
from .ranks import rank_times, rank_words
from .report_data import SLOWEST, json_block, page_data, steps_in_page
from .report_verdict import further_rows, parts_text, phase_panels
from .report_words import visible
from .schema import PHASES
from .trace import Trace
from .verdicts import judge

LONG_TEXT = 700
OPERATORS_SHOWN = 60


def write_report(trace: Trace, path: Path) -> Path:
    """Write the report of a trace as one HTML file and return its path.

    Raises:
        TraceError: when the trace cannot be read, or the file cannot be written.
    """
    # a lone half of a surrogate pair may stand in a manifest, and has no place in UTF-8
    page = render_report(trace).encode("utf-8", "replace")
    with replacing(Path(path), "report") as file:
        file.write(page)
    return Path(path)


def render_report(trace: Trace) -> str:
    """Return the page as text."""
    times = blocks.step_times(trace)
    numbers = latency(trace)
    verdicts = judge(trace)
    highest = memory(trace)
    operator_rows = operators(trace)
    shown = slowest(operator_rows, OPERATORS_SHOWN)
    rows = report_words.stage_rows(trace, verdicts)
    where = report_words.where_sentences(numbers, times, rows)
    page: str = _template().render(
        meta=trace.meta,
        title=visible(str((trace.meta.get("model") or {}).get("id") or "unnamed model")),
        facts=report_head.facts(trace),
        marks=report_head.marks(trace),
        notes=[visible(str(note)) for note in [*(trace.meta.get("notes") or []), *rank_words(rank_times(trace))]],
        prompts=report_head.texts(trace, "prompt"),
        outputs=report_head.texts(trace, "output"),
        long_text=LONG_TEXT,
        slowest=SLOWEST,
        panels=phase_panels(verdicts, where),
        further=further_rows(verdicts),
        parts_text=parts_text,
        cards=report_head.cards(trace, numbers),
        rows=rows,
        judged=any(cell.roof_ns is not None for row in rows for cell in (row.prefill, row.decode) if cell),
        scale=max((cell.share for row in rows for cell in (row.prefill, row.decode) if cell), default=1.0),
        steps=len(times),
        steps_held=len(steps_in_page(times)),
        has_spans=bool(times.has_spans.any()),
        has_tokens=len(trace.table("tokens", ["logprob"])) > 0,
        has_logprobs=len(trace.table("tokens", ["logprob"])["logprob"].drop_null()) > 0,
        has_ceilings=verdicts.ceilings_source is not None,
        layers=report_words.layer_count(trace),
        kv_words=report_words.kv_sentence(trace, kv_form(trace)) + report_words.kv_use_sentence(kv_use(trace)),
        highest=highest,
        memory_pieces=report_words.memory_pieces(highest),
        predictions=predicted(trace),
        modules=report_words.module_rows(trace),
        operators=shown,
        operators_left=len(operator_rows) - len(shown),
        visible=visible,
        environment=report_words.environment(trace),
        definitions=report_words.DEFINITIONS,
        units=units,
        data=json_block(page_data(trace, times)),
        css=Markup(_asset("report.css")),
        js=Markup(_asset("report.js")),
        plotly=Markup(get_plotlyjs()),
    )
    return page


def slowest(rows: list[OperatorTime], most: int) -> list[OperatorTime]:
    """The slowest operators of each phase, as many of each as there is room for."""
    return [row for phase in PHASES for row in [row for row in rows if row.phase == phase][: most // len(PHASES)]]


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=report_words.shown,
    )
    return environment.from_string(_asset("report.html"))
