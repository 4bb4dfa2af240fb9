"""The report in a real browser: no error, no request, every control, at the widths of a desk, a tablet and a phone."""

from pathlib import Path

import pytest
from chromium import CHROMIUM, Chromium
from report_traces import HOSTILE, call_facts, hostile, judged, long_trace, odd_traces, rows_of_call, small, write_trace

from lifetrace.analysis import report, report_words
from lifetrace.analysis.trace import Trace

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
WIDTHS = (1200, 800, 390)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def written(trace: Trace) -> Path:
    return report.write_report(trace, trace.path / "report.html")


def text(browser: Chromium, selector: str) -> str:
    return browser.run(f"document.querySelector({selector!r}).textContent").replace("\xa0", " ")


def assert_quiet(browser: Chromium, page: Path) -> None:
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (800, True), (390, False), (390, True)])
def test_it_draws_asks_for_nothing_and_keeps_to_the_width(browser, tmp_path, width, dark):
    page = written(judged(tmp_path / "t"))
    browser.open(page, width, dark)
    assert_quiet(browser, page)
    assert browser.run("document.querySelectorAll('.main-svg').length") >= 7
    assert browser.run("document.documentElement.scrollWidth") <= width
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (not dark)


def test_the_lifecycle_map_shows_this_step(browser, tmp_path):
    browser.open(written(judged(tmp_path / "t")), 1200)
    assert text(browser, "#where") == "Prefill · 20.0 ms"
    assert "all 3 positions go through every stage at once" in text(browser, "#saying")
    assert text(browser, "#kvtext") == "KV cache after this step: 3 positions in 2 layers, 3.00 kB (+3.00 kB)."
    assert text(browser, "#loop") == "append, and go round again"
    attention = text(browser, "[data-stage=attention] .meters")
    assert "8.50 ms" in attention  # 8.5 of 20 ms each for attention and the MLP
    assert "memory 12%" in attention  # 1 ms of 8.5
    browser.run("document.getElementById('next').click()")
    assert "compute 57%" in text(browser, "[data-stage=mlp] .meters")
    assert text(browser, "#detail-title") == "Decode 1 · step 1 · 10.0 ms · compute-bound, 22% of its roof"


def test_a_block_that_is_unusually_slow_is_marked(browser, tmp_path):
    """Attention takes 3.5 ms in each decode step, of which one takes 10.5 in its two layers."""
    rows = rows_of_call(new=12)
    for row in rows["spans"]:
        if row["step"] == 5 and row["part"] == "attention":
            row["host_ns"] *= 3
        if row["step"] == 5 and row["stage"] == "layer" and row["part"] is None:
            row["host_ns"] += 3_500_000
    browser.open(written(write_trace(tmp_path / "t", {"calls": [call_facts(0, 3, 12, 0)]}, **rows)), 800)
    shown = {}
    for step in range(12):
        browser.run(f"location.hash = ''; document.getElementById('step').value = {step}")
        browser.run("document.getElementById('step').dispatchEvent(new Event('input'))")
        browser.settle()
        shown[step] = browser.run("[...document.querySelectorAll('#map .odd')].map(row => row.textContent)")
    assert shown.pop(5) == ["slow3.0 × the usual"]
    assert set(map(tuple, shown.values())) == {()}


def test_a_chart_without_data_is_a_sentence(browser, tmp_path):
    browser.open(written(small(tmp_path / "t")), 800)
    assert text(browser, "[data-chart=roofline]") == "No stage has its FLOPs, bytes and time counted."
    browser.run("document.querySelector('[data-chart=roofline]').focus()")
    browser.press("ArrowRight")
    assert browser.complaints == []


def test_a_linked_step_is_shown(browser, tmp_path):
    page = written(small(tmp_path / "t"))
    browser.open(page, 1200)
    browser.run("location.hash = '#step=3'")
    browser.reload()
    assert text(browser, "#where") == "Decode 3 · 10.0 ms"
    assert text(browser, "#loop") == "stops here: token limit"


def test_every_control_works_by_keyboard(browser, tmp_path):
    rows = rows_of_call()
    for row in rows["tokens"]:
        row |= {"logprob": -0.5, "entropy": 1.25}
    trace = judged(tmp_path / "t")
    write_trace(tmp_path / "t", trace.meta, tokens=rows["tokens"])
    page = written(trace)
    browser.open(page, 1200)
    seen: list[str] = []
    while "BODY" not in seen:  # once round the page
        browser.press("Tab")
        key = browser.run("(at => at.id || at.name || at.dataset.chart || at.tagName)(document.activeElement)")
        assert len(seen) < 60, seen
        seen.append(key)
        if key == "step":
            browser.press("ArrowRight", 2)
            assert text(browser, "#where") == "Decode 2 · 10.0 ms"
        elif key == "next":
            browser.press("Enter")
            assert text(browser, "#where") == "Decode 3 · 10.0 ms"
        elif key == "play":
            browser.press(" ")
            assert text(browser, "#play") == "Pause"
            browser.press(" ")
            assert text(browser, "#play") == "Play"
        elif key == "detail":
            browser.press("ArrowRight", 2)
            assert "of the step" in text(browser, "#readout")
            browser.press("Enter")
            browser.press("Escape")
        elif key == "tint":
            browser.press("ArrowRight")
            assert "less probable" in text(browser, "#tint-words")
        elif key == "strip":
            browser.press("ArrowLeft")
            assert "entropy 1.25 nats" in text(browser, "#token-readout")
        elif key == "heat":
            browser.press("ArrowRight")
            assert browser.run("document.querySelector('[data-chart=heatmap]').data[0].zmax") == 100
        elif key == "roofline":
            browser.press("ArrowRight", 2)
            # the second point is the attention of the decode steps
            assert "600 MFLOP ÷ 300 MB = 2.00 FLOP/B" in text(browser, "#roofline-readout")
        elif key == "SUMMARY":
            browser.press("Enter")
    assert {"step", "next", "play", "roofline", "detail", "tint", "strip", "heat", "SUMMARY"} <= set(seen)
    assert browser.run("document.querySelectorAll('.folded details[open]').length") == 3
    assert_quiet(browser, page)


def test_every_control_works_by_pointer(browser, tmp_path):
    calls = [rows_of_call(call) for call in range(2)]
    rows = {name: [row for one in calls for row in one[name]] for name in calls[0]}
    facts = {"calls": [call_facts(call, 3, 4, 1000 * call) for call in range(2)]}
    page = written(write_trace(tmp_path / "t", facts, **rows))
    browser.open(page, 1200)
    browser.run("document.querySelector('#strip .given').click()")
    assert text(browser, "#where") == "Prefill · 20.0 ms"  # the token that was clicked came from the prefill
    browser.run("""(() => {
        const box = document.getElementById('detail').getBoundingClientRect();
        const at = {clientX: box.left + box.width / 2, clientY: box.top + 40, bubbles: true};
        for (const kind of ['mousemove', 'click'])
            document.getElementById('detail').dispatchEvent(new MouseEvent(kind, at));
    })()""")
    assert "of the step" in text(browser, "#readout")
    browser.run("""(() => {
        const call = document.getElementById('call'), slider = document.getElementById('step');
        call.value = 1; call.dispatchEvent(new Event('change'));
        slider.value = 3; slider.dispatchEvent(new Event('input'));
        for (const name of ['beforeprint', 'afterprint', 'resize']) dispatchEvent(new Event(name));
    })()""")
    browser.settle()
    assert text(browser, "#where") == "Decode 3 · 10.0 ms"
    assert text(browser, "#detail-title").startswith("Decode 3 · step 7 ")
    assert_quiet(browser, page)


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_text_runs_nothing_and_is_shown(browser, tmp_path, width):
    page = written(hostile(tmp_path / "t"))
    browser.open(page, width)
    assert_quiet(browser, page)
    assert browser.run("document.title").endswith("· lifetrace")
    assert browser.run("document.querySelectorAll('img').length") == 0
    strip = text(browser, "#strip")
    assert report_words.visible(HOSTILE) in strip
    assert strip.count("◌") == 3
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_odd_traces_open_without_an_error(browser, tmp_path):
    for name, trace in odd_traces(tmp_path).items():
        page = written(trace)
        browser.open(page, 800)
        assert (browser.complaints, browser.requests) == ([], [page.as_uri()]), name


def test_a_long_run_stays_light(browser, tmp_path):
    """1,000 steps of 32 layers: 196,000 spans, drawn on a canvas and as paths, a few thousand nodes in all."""
    page = written(long_trace(tmp_path / "t", 1000, 32))
    browser.open(page, 1200)
    assert_quiet(browser, page)
    assert browser.run("document.querySelectorAll('*').length") < 6000
    browser.run("document.getElementById('step').value = 700")
    browser.run("document.getElementById('step').dispatchEvent(new Event('input'))")
    browser.settle()
    assert text(browser, "#where").startswith("Decode 700")


def test_ten_thousand_tokens_come_in_pieces(browser, tmp_path):
    rows = rows_of_call()
    token = rows["tokens"][-1]
    rows["tokens"] += [token | {"position": 7 + i, "text": f" t{i}"} for i in range(10_000)]
    page = written(write_trace(tmp_path / "t", {"calls": [call_facts(0, 3, 10_004, 0)]}, **rows))
    browser.open(page, 390)
    assert_quiet(browser, page)
    count = "document.querySelectorAll('#strip [data-i]').length"
    assert browser.run(count) == 2000
    for _ in range(5):
        browser.run("document.getElementById('more').click()")
    assert browser.run(count) == 10_007
    assert browser.run("document.getElementById('more').hidden")


def test_print_shows_all_of_it(browser, tmp_path):
    page = written(judged(tmp_path / "t"))
    browser.open(page, 1200)
    pdf = browser.send("Page.printToPDF")["data"]
    assert len(pdf) > 10_000
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.getElementById('play')).display") == "none"
    browser.send("Emulation.setEmulatedMedia", media="")
    assert_quiet(browser, page)
