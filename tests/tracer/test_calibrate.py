"""The logic of measuring on a clock that the tests control; what a real device reaches is only checked for sense."""

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from fake_device import fake_ceilings

from lifetrace import calibrate as measuring
from lifetrace.analysis.ceilings import MEASURED, Ceilings, Figure, Quietness
from lifetrace.analysis.ceilings_view import ceiling_rows, ceilings_figure, quiet_words
from lifetrace.calibrate import GIB, KIB, MIB, Buffer, Plan
from lifetrace.cli import main

CPU = torch.device("cpu")
TINY = Plan(
    matmul_sizes=(16, 32), working_sets=(64 * KIB, 256 * KIB), matvec_sets=(64 * KIB, 256 * KIB), rows=(4,),
    figure_ns=100_000, max_rounds=5, launch_operators=16,
)  # fmt: skip


class FakeTimer:
    """Does the work and says that it took the next of the given times, the last one for ever."""

    def __init__(self, *times_ns):
        self.times_ns = list(times_ns)
        self.rounds = 0

    def time_ns(self, work):
        work()
        self.rounds += 1
        return self.times_ns.pop(0) if len(self.times_ns) > 1 else self.times_ns[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("LIFETRACE_CACHE", str(tmp_path / "cache" / "lifetrace"))
    return tmp_path / "cache" / "lifetrace"


class TestRounds:
    def test_the_warm_up_is_not_a_round(self):
        timer = FakeTimer(9_999_999, 10, 20, 30)
        assert measuring.rounds_ns(lambda: None, timer, replace(TINY, figure_ns=10)) == [10, 20, 30]
        assert timer.rounds == 4

    def test_rounds_go_on_until_the_time_is_used_up(self):
        assert len(measuring.rounds_ns(lambda: None, FakeTimer(10), replace(TINY, figure_ns=100, max_rounds=99))) == 10

    def test_slow_rounds_are_fewer_than_three(self):
        assert measuring.rounds_ns(lambda: None, FakeTimer(500), replace(TINY, figure_ns=100)) == [500]
        assert measuring.rounds_ns(lambda: None, FakeTimer(300), replace(TINY, figure_ns=100)) == [300, 300]

    def test_there_are_never_more_than_the_most(self):
        assert len(measuring.rounds_ns(lambda: None, FakeTimer(1), TINY)) == 5

    def test_a_clock_that_did_not_move_gives_no_zero(self):
        assert set(measuring.rounds_ns(lambda: None, FakeTimer(0), replace(TINY, figure_ns=1))) == {1}

    def test_figure(self):
        assert measuring.figure([1, 2, 3, 4, 5]) == Figure(3, 2, 4)
        assert measuring.figure([7]) == Figure(7, 7, 7)
        assert Figure(4, 3, 5).spread == 0.5


class TestRates:
    def test_a_product_counts_two_flops_a_multiply_add(self):
        """A round is 4,000,000 // (2 · 32³) = 61 products."""
        *_, last = measuring.matmul_points(CPU, torch.float32, FakeTimer(61_000), replace(TINY, matmul_sizes=(32,)))
        first = next(measuring.matmul_points(CPU, torch.float32, FakeTimer(61_000), replace(TINY, matmul_sizes=(32,))))
        assert first.shape == (32, 32, 32)
        assert first.flops_per_s.median == pytest.approx(2 * 32**3 / 1e-6)
        assert last.shape == (8, 64, 64)

    def test_sizes_stop_before_they_take_too_long(self):
        """A round of 1 ms: eight times that, four times over, is more than three times the figure's 1 ms."""
        plan = replace(TINY, matmul_sizes=(512, 1024, 2048), figure_ns=1_000_000)
        points = list(measuring.matmul_points(CPU, torch.float32, FakeTimer(1_000_000), plan))
        assert [point.shape for point in points] == [(512, 512, 512), (256, 1024, 512), (128, 1024, 1024)]

    def test_reading_leaves_out_what_the_call_costs(self):
        """16 calls on few elements take 1,600 ns: 100 each. Four passes over 1 MiB take 1,000 ns each."""
        timer = FakeTimer(1, *[1_600] * 4, 1, 4_000)
        buffer = Buffer(CPU, MIB)
        found = measuring._net_rate(torch.sum, buffer.values(torch.float32, MIB // 4), MIB, timer, TINY)
        assert found.median == pytest.approx(MIB / 900 * 1e9)

    def test_at_most_half_the_time_is_taken_off(self):
        timer = FakeTimer(1, *[64_000_000] * 5, 1, 4_000)
        plan = replace(TINY, figure_ns=10**12)
        buffer = Buffer(CPU, MIB)
        found = measuring._net_rate(torch.sum, buffer.values(torch.float32, MIB // 4), MIB, timer, plan)
        assert found.median == pytest.approx(4 * MIB / 2_000 * 1e9)

    def test_copying_counts_bytes_read_and_written(self):
        point = measuring.copy_point(Buffer(CPU, 8 * MIB), 8 * MIB, FakeTimer(1_000), TINY)
        # one copy a round in 1,000 ns less the 1,000 ÷ 16 of a call
        assert point.bytes_per_s.median == pytest.approx(8 * MIB / (1_000 - 1_000 / 16) * 1e9)

    def test_matrix_vector_counts_the_matrix(self):
        """4 MiB of matrices a round: 64 of 64 KiB, 128 × 128 in float32."""
        point = measuring.matvec_point(Buffer(CPU, MIB), torch.float32, 64 * KIB, FakeTimer(6_400), TINY)
        assert point.bytes_per_s.median == pytest.approx(64 * KIB / 100 * 1e9)

    def test_launching_is_divided_by_the_operators_of_a_layer(self):
        """Norms 2 · 6, products 7, rotary 2 · 5 (neg, cat, two products, a sum), cache 2, attention 1, rest 4."""
        layer, inputs = measuring.TinyLayer(), (torch.ones(1, 1, 64), torch.ones(1, 4, 8, 16), torch.ones(16))
        with torch.no_grad():
            count = measuring.count_operators(lambda: layer(*inputs))
        assert count == 12 + 7 + 10 + 2 + 1 + 4  # residuals 2, activation and its product 2
        assert measuring.launch_ns(CPU, FakeTimer(36_000), TINY).median == 1_000

    def test_no_copy_to_the_device_where_memory_is_shared(self):
        assert measuring.host_to_device_figure(CPU, FakeTimer(1), TINY) is None


class TestBuffer:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_values_are_finite_and_not_zeros(self, dtype):
        buffer = Buffer(CPU, MIB)
        for wanted in (torch.float32, dtype):
            values = buffer.values(wanted, MIB // wanted.itemsize)
            assert values.dtype == wanted
            assert values.isfinite().all()
            assert 0.4 < values.float().mean() < 0.6

    def test_matrices_have_the_size_asked_for(self):
        matrices = Buffer(CPU, 64 * MIB).matrices(torch.float32, 64 * MIB, 16 * MIB)
        assert [tuple(matrix.shape) for matrix in matrices] == [(2048, 2048)] * 4


class TestPlan:
    @pytest.mark.parametrize("quick", [True, False])
    @pytest.mark.parametrize("device", [CPU, torch.device("cuda")])
    def test_no_more_than_an_eighth_of_the_memory(self, device, quick):
        small = measuring.plan_for(device, quick, GIB)
        assert max(small.working_sets + small.matvec_sets) <= GIB // 8
        large = measuring.plan_for(device, quick, 64 * GIB)
        assert max(large.working_sets) >= 512 * MIB

    def test_a_machine_without_memory_still_has_a_size(self):
        assert measuring.plan_for(CPU, True, KIB).working_sets == (64 * KIB,)


class TestQuiet:
    @pytest.mark.parametrize(
        ("spread", "others", "load", "quiet"),
        [
            (0.05, 0.0, 9.0, True),  # the load average may stem from what ran before
            (0.5, 0.0, 0.0, False),
            (0.05, 0.9, 0.0, False),
            (0.05, None, 0.3, True),
            (0.05, None, 2.0, False),
            (0.05, None, None, True),
        ],
    )
    def test_judgement(self, spread, others, load, quiet, monkeypatch):
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        assert measuring.quietness(spread, others, load).quiet is quiet

    def test_spread_of_equal_rounds_is_nothing(self):
        assert measuring.kernel_spread(CPU, FakeTimer(50), rounds=20) == 0

    def test_words(self):
        assert quiet_words(fake_ceilings()) is None
        loud = replace(fake_ceilings(), quietness=measuring.quietness(0.5, 1.25, 2.0))
        assert "NOT quiet: equal work differed by 50%, other programs kept 1.25 cores busy" in quiet_words(loud)


class TestStore:
    def test_what_is_stored_is_loaded(self, folder):
        ceilings = fake_ceilings()
        assert measuring.load(ceilings.device) == (None, None)
        assert measuring.store(ceilings) is None
        assert measuring.load(ceilings.device) == (ceilings, None)
        assert [file.suffix for file in folder.iterdir()] == [".json"]

    @pytest.mark.parametrize("change", [{"threads": 2}, {"torch": "1"}, {"driver": "13.0"}, {"name": "other"}])
    def test_another_thread_count_library_or_device_is_another_file(self, folder, change):
        ceilings = fake_ceilings()
        measuring.store(ceilings)
        assert measuring.load(replace(ceilings.device, **change)) == (None, None)

    @pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"format": 1}', '{"format": 2}', "[" * 100_000, "\xff"])
    def test_a_damaged_file_is_ignored_with_a_note(self, folder, text):
        ceilings = fake_ceilings()
        measuring.store(ceilings)
        file = measuring.cache_file(ceilings.device)
        file.write_text(text, encoding="latin-1")
        found, note = measuring.load(ceilings.device)
        assert found is None
        assert str(file) in note
        assert measuring.keep(ceilings) == (str(file), [])
        assert measuring.load(ceilings.device) == (ceilings, None)

    def test_a_file_of_another_device_is_not_used(self, folder):
        ceilings = fake_ceilings()
        other = replace(ceilings.device, name="other")
        measuring.store(ceilings)
        measuring.cache_file(ceilings.device).rename(measuring.cache_file(other))
        assert measuring.load(other)[0] is None
        assert "another device" in measuring.load(other)[1]

    def test_a_disk_that_takes_nothing_gives_a_note(self, folder):
        folder.parent.write_text("a file where the folder should be")
        file, (note,) = measuring.keep(fake_ceilings())
        assert file is None
        assert "could not be kept" in note

    def test_a_disturbed_one_does_not_replace_a_quiet_one(self, folder):
        quiet = fake_ceilings()
        noisy = replace(quiet, quietness=Quietness(quiet=False, spread=0.5, others_cpu=0.9, load_average=3.0))
        measuring.keep(quiet)
        _, notes = measuring.keep(noisy)
        assert "does not replace" in notes[0]
        assert measuring.load(quiet.device) == (quiet, None)

    def test_a_quick_one_does_not_replace_a_full_one(self, folder):
        full = fake_ceilings()
        measuring.keep(full)
        _, notes = measuring.keep(replace(full, quick=True))
        assert "does not replace" in notes[0]
        assert measuring.load(full.device) == (full, None)

    def test_the_folder_is_the_users_cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("LIFETRACE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert measuring.cache_folder() == tmp_path / ".cache" / "lifetrace"
        monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
        assert measuring.cache_folder() == tmp_path / ".cache" / "lifetrace"


def rates(ceilings):
    """Every figure of a calibration."""
    for tables in (ceilings.matmul, ceilings.linear):
        for points in tables.values():
            yield from (point.flops_per_s for point in points)
    for points in (ceilings.read, ceilings.copy, *ceilings.matvec.values()):
        yield from (point.bytes_per_s for point in points)
    yield ceilings.launch_ns


@pytest.mark.parametrize("plan", [TINY, measuring.plan_for(CPU, True, 256 * MIB)], ids=["tiny", "quick"])
def test_calibration_gives_positive_finite_figures_and_leaves_the_random_state(plan):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    told = []
    found = measuring.calibrate(CPU, progress=told.append, plan=plan)
    assert torch.rand(1) == expected
    assert all(0 < value < math.inf for f in rates(found) for value in (f.median, f.low, f.high))
    assert {"float32", "bfloat16"} <= set(found.matmul) == set(found.matvec) == set(found.linear)
    assert [point.working_set_bytes for point in found.read] == list(plan.working_sets)
    assert (found.source, found.device.threads, found.host_to_device_bytes_per_s) == (MEASURED, 1, None)
    assert found.quietness.spread >= 0
    assert any("bandwidth" in text for text in told)
    assert Ceilings.from_json(json.loads(json.dumps(found.to_json()))) == found


class TestForARun:
    @pytest.fixture
    def calls(self, folder, monkeypatch):
        """How often was measured; each takes its quietness from the list `spreads`."""
        calls = []
        real = measuring.calibrate

        def tiny(device, quick, progress):
            calls.append(quick)
            spread = self.spreads.pop(0)
            return replace(real(device, plan=TINY), quick=quick, quietness=measuring.quietness(spread, 0.0, 0.0))

        monkeypatch.setattr(measuring, "calibrate", tiny)
        return calls

    def test_measured_once_and_again_when_the_file_is_damaged(self, calls):
        self.spreads = [0.1, 0.1]
        first, notes = measuring.ceilings_for(CPU)
        assert (calls, notes) == ([True], [])
        assert measuring.ceilings_for(CPU) == (first, [])
        assert calls == [True]
        measuring.cache_file(measuring.device_key(CPU)).write_text("damaged")
        _, notes = measuring.ceilings_for(CPU)
        assert "cannot be read" in notes[0]
        assert calls == [True, True]

    def test_disturbed_ones_are_measured_anew(self, calls):
        self.spreads = [0.9, 0.1]
        _, notes = measuring.ceilings_for(CPU)
        assert "not quiet" in notes[0]
        found, notes = measuring.ceilings_for(CPU)
        assert (calls, notes, found["quietness"]["quiet"]) == ([True, True], [], True)

    def test_what_cannot_be_measured_is_null_with_a_note(self, folder, monkeypatch):
        def out_of_memory(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.\nmore")

        monkeypatch.setattr(measuring, "calibrate", out_of_memory)
        found, (note,) = measuring.ceilings_for(CPU)
        assert found is None
        assert note.endswith("could not be measured: CUDA out of memory. Tried to allocate 512.00 MiB.")


class TestCommand:
    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch, folder):
        real = measuring.calibrate
        monkeypatch.setattr(
            measuring, "calibrate", lambda device, quick, progress: real(device, quick, progress, plan=TINY)
        )

    def test_table_file_and_plot(self, folder, tmp_path):
        result = CliRunner().invoke(main, ["calibrate", "--device", "cpu", "--plot", str(tmp_path / "p.html")])
        assert result.exit_code == 0, result.output
        assert "launching an operator" in result.stdout
        assert "calibrating" in result.stderr
        assert len(list(folder.glob("calibration-*.json"))) == 1
        assert "plotly" in (tmp_path / "p.html").read_text()

    def test_json_is_one_document(self, folder):
        result = CliRunner().invoke(main, ["calibrate", "--json", "--quick"])
        document = json.loads(result.stdout)
        assert document["quick"] is True
        assert document["stored"].startswith(str(folder))
        assert document["notes"] == []
        assert Ceilings.from_json(document).launch_ns.median > 0

    @pytest.mark.parametrize(
        "options", [["--device", "toaster"], ["--device", "cuda:77"], ["--plot", "/nowhere/at/all/p.html"]]
    )
    def test_bad_input_is_a_sentence(self, options):
        result = CliRunner().invoke(main, ["calibrate", *options])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith("lifetrace: T")


def test_view_of_a_datasheet_and_of_measured_figures():
    rows = ceiling_rows(fake_ceilings())
    assert ("float32 product at 64 × 64 × 64", "1.00 TFLOP/s", "1.00–1.00") in rows
    assert ("launching an operator", "1.00 µs", "1.00 µs–1.00 µs") in rows
    assert {trace.name for trace in ceilings_figure(fake_ceilings()).data} >= {"read", "copy", "float32 n × n × n"}
