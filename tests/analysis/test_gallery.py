"""Figures by name from Python, and as pictures."""

import importlib.util
import subprocess
import sys

import plotly.graph_objects as go
import pytest
from report_traces import judged, small

from lifetrace.analysis import gallery
from lifetrace.analysis.gallery import FIGURES, write_picture
from lifetrace.errors import TraceError

METHODS = ("timeline", "breakdown", "roofline", "heatmap", "kv_growth", "memory", "token_latency")


@pytest.mark.parametrize("name", METHODS)
def test_a_trace_draws_its_figures(tmp_path, name):
    figure = getattr(judged(tmp_path / "t"), name)()
    assert isinstance(figure, go.Figure)
    assert len(figure.data) > 0


def test_the_heat_map_has_two_colours(tmp_path):
    trace = judged(tmp_path / "t")
    # 3.5 ms of a layer in a decode step, whose compute takes 1.1; 8.5 in the prefill
    assert trace.heatmap().data[0].z.tolist() == [[8.5, 3.5, 3.5, 3.5]] * 2
    assert trace.heatmap(by="efficiency").data[0].z[0].tolist() == pytest.approx([1.1 / 0.085, *[1.1 / 0.035] * 3])
    with pytest.raises(ValueError, match="takes 'time' or 'efficiency'"):
        trace.heatmap(by="heat")


def test_a_trace_is_opened_without_plotly():
    code = "import lifetrace.analysis.trace, sys; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_exporter_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TraceError, match="pip install kaleido"):
        write_picture(small(tmp_path / "t"), "roofline", tmp_path / "x.png", "png")
    assert not (tmp_path / "x.png").exists()


def test_a_picture_is_what_the_exporter_gives(tmp_path, monkeypatch):
    asked = []

    def drawn(figure, **settings):
        asked.append(settings)
        return b"picture"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(go.Figure, "to_image", drawn)
    for kind in gallery.PICTURES:
        assert write_picture(judged(tmp_path / "t"), "roofline", tmp_path / "x", kind).read_bytes() == b"picture"
    assert [settings["format"] for settings in asked] == ["png", "svg"]
    assert asked[0]["height"] == 420


def test_an_exporter_that_fails_is_named(tmp_path, monkeypatch):
    def fail(figure, **settings):
        raise RuntimeError("no browser\nat all")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(go.Figure, "to_image", fail)
    with pytest.raises(TraceError, match=r"figure memory: no browser It needs Chrome"):
        write_picture(judged(tmp_path / "t"), "memory", tmp_path / "x.png", "png")


def test_the_command_names_every_figure():
    from lifetrace.commands.export import FIGURES as named

    assert tuple(FIGURES) == named
