from dataclasses import replace

import pytest
from fake_device import (
    DECODE_FLOPS,
    GIGA,
    PREFILL_FLOPS,
    WEIGHTS,
    fake_ceilings,
    layer_span,
    prefill_and_decode,
    step,
)
from stored_traces import MS, one_call, write_trace

from lifetrace.analysis import read_trace
from lifetrace.analysis.ceilings import (
    BandwidthPoint,
    Ceilings,
    Figure,
    Quietness,
    bandwidth_at,
    faster,
    from_datasheet,
    of_manifest,
)
from lifetrace.analysis.roofline import Work, explain, phase_verdicts, rooflines, step_verdicts, verdict
from lifetrace.analysis.verdict_view import bound_cell, lead_rows
from lifetrace.analysis.verdicts import decode_batch, judge, kv_context, line, prefill_length, statement
from lifetrace.analysis.waits import Waits

DEVICE = fake_ceilings()  # 1,000 FLOP/ns, 100 B/ns, 1,000 ns an operator


def judged(flops=0, bytes_=0, ops=None, measured_ns=1e9, ceilings=DEVICE, dtype="float32"):
    return verdict(flops, bytes_, ops, measured_ns, ceilings, dtype, None)


class TestVerdict:
    def test_compute_bound(self):
        found = judged(flops=5_000_000, bytes_=100_000, ops=3, measured_ns=10_000)
        assert (found.bound, found.close_to, found.fault) == ("compute", None, None)
        assert (found.compute_ns, found.memory_ns, found.launch_ns) == (5_000, 1_000, 3_000)
        assert (found.roof_ns, found.efficiency, found.lost_ns) == (5_000, 0.5, 5_000)
        assert (found.intensity, found.ridge) == (50, 10)

    def test_memory_bound(self):
        found = judged(flops=1_000_000, bytes_=800_000, ops=3, measured_ns=10_000)
        assert (found.bound, found.roof_ns, found.efficiency) == ("memory", 8_000, 0.8)

    def test_launch_bound_leaves_the_roof_to_compute_and_memory(self):
        found = judged(flops=1_000_000, bytes_=200_000, ops=9, measured_ns=10_000)
        assert (found.bound, found.launch_ns, found.roof_ns, found.lost_ns) == ("launch", 9_000, 2_000, 8_000)

    @pytest.mark.parametrize(
        ("flops", "bytes_", "ops", "expected"),
        [
            (5_000_000, 500_000, None, ("compute", "memory")),
            (5_000_000, 450_000, None, ("compute", "memory")),
            (5_000_000, 449_000, None, ("compute", None)),
            (4_600_000, 500_000, None, ("memory", "compute")),
            (4_600_000, 500_000, 5, ("memory", "launch")),
            (0, 500_000, 5, ("memory", "launch")),
        ],
    )
    def test_ties(self, flops, bytes_, ops, expected):
        found = judged(flops, bytes_, ops)
        assert (found.bound, found.close_to) == expected

    def test_only_the_ceilings_flip_the_bound(self):
        work = {"flops": 2_000_000, "bytes_": 100_000, "ops": 1}
        assert judged(**work).bound == "compute"
        assert judged(**work, ceilings=fake_ceilings(bandwidth=10 * GIGA)).bound == "memory"
        assert judged(**work, ceilings=fake_ceilings(launch_ns=5_000.0)).bound == "launch"

    @pytest.mark.parametrize(("flops", "bytes_"), [(None, 1), (1, None), (None, None)])
    def test_a_count_that_is_missing_makes_it_unknown(self, flops, bytes_):
        found = judged(flops, bytes_, ops=10)
        assert (found.bound, found.roof_ns, found.efficiency, found.lost_ns) == ("unknown", None, None, None)
        assert found.launch_ns == 10_000

    def test_a_ceiling_that_is_missing_makes_its_term_null(self):
        other = judged(1_000, 1_000, dtype="bfloat16")
        assert (other.bound, other.compute_ns, other.memory_ns, other.ridge) == ("unknown", None, 10, None)
        nothing = judged(1_000, 1_000, 3, ceilings=None)
        assert (nothing.bound, nothing.compute_ns, nothing.memory_ns, nothing.launch_ns) == ("unknown", *[None] * 3)
        assert judged(1_000, 1_000, 3, ceilings=fake_ceilings(launch_ns=None)).launch_ns is None

    def test_no_flops_need_no_peak(self):
        found = judged(0, 1_000, dtype="bfloat16")
        assert (found.bound, found.compute_ns, found.roof_ns, found.intensity) == ("memory", 0, 10, 0)

    def test_operators_that_were_not_counted_are_null_not_0(self):
        assert judged(1_000, 1_000, None).launch_ns is None

    def test_no_work_is_unknown(self):
        assert judged(0, 0, 0).bound == "unknown"
        assert judged(0, 0, 0).intensity is None

    def test_above_the_roof_is_a_fault(self):
        assert judged(1_000_000, 10, measured_ns=1_000 / 1.05).fault is None
        assert "matmul ceiling" in judged(1_000_000, 10, measured_ns=1_000 / 1.06).fault
        assert "bandwidth" in judged(10, 100_000, measured_ns=500).fault

    @pytest.mark.parametrize("measured_ns", [None, 0])
    def test_no_time_no_efficiency(self, measured_ns):
        found = judged(1_000, 10, measured_ns=measured_ns)
        assert (found.bound, found.efficiency, found.lost_ns, found.fault) == ("compute", None, None, None)

    def test_a_device_out_of_work_is_launch_bound_without_a_count(self):
        assert verdict(10_000, 10, None, 1e6, DEVICE, "float32", None, starved_share=0.9).bound == "launch"
        assert verdict(10_000, 10, None, 1e6, DEVICE, "float32", None, starved_share=0.3).bound == "compute"
        assert verdict(None, 10, None, 1e6, DEVICE, "float32", None, starved_share=0.9).bound == "unknown"


class TestExplanation:
    def test_parts_add_up(self):
        """One row: 100,000 B take 1,000 ns to read, 2,000 in a matrix–vector product; copies 500; launches 3,000."""
        work = Work(50_000, 100_000, 3, weight_bytes=100_000, kv_copy_bytes=100_000, rows=1)
        found = explain(work, judged(50_000, 100_000, 3, 8_000), 8_000, DEVICE, "float32", None)
        assert (found.roof_ns, found.kernel_gap_ns, found.copy_ns, found.launch_ns) == (1_000, 1_000, 500, 3_000)
        assert (found.unexplained_ns, found.explained_share) == (2_500, 5_500 / 8_000)

    def test_on_cuda_launching_hides_behind_the_device(self):
        cuda = fake_ceilings(type_="cuda")
        work = Work(50_000, 100_000, 3, weight_bytes=100_000, kv_copy_bytes=100_000, rows=1)
        found = explain(work, judged(50_000, 100_000, 3, 8_000), 8_000, cuda, "float32", None)
        assert found.launch_ns == 3_000 - 2_500

    def test_few_rows(self):
        """Four rows of 25,000 weights: 200,000 FLOP; half way between 25 and 400 FLOP/ns on the logarithm of rows."""
        work = Work(200_000, 100_000, None, weight_bytes=100_000, rows=4)
        found = explain(work, judged(200_000, 100_000, None, 8_000), 8_000, DEVICE, "float32", None)
        assert found.kernel_gap_ns == 0  # 200,000 ÷ 212.5 = 941 ns, and reading takes 1,000
        assert found.launch_ns is None

    def test_waiting_is_explained_as_it_was_measured(self):
        """The roof is 1,000 ns of 8,000; 4,000 of bringing weights and 500 of talking leave 2,500."""
        work, waits = Work(0, 100_000, None), Waits(weights_ns=4_000, communication_ns=500)
        found = explain(work, judged(0, 100_000, None, 8_000), 8_000, DEVICE, "float32", None, waits)
        assert (found.weights_ns, found.communication_ns, found.unexplained_ns) == (4_000, 500, 2_500)

    def test_no_roof_no_explanation(self):
        assert explain(Work(None, 1, 1), judged(None, 1, 1), 10, DEVICE, "float32", None) is None
        assert explain(Work(1, 1, 1), judged(1, 1, 1, ceilings=None), 10, None, "float32", None) is None


class TestCeilings:
    def test_bandwidth_between_points_is_on_the_logarithm(self):
        points = [BandwidthPoint(2**size, Figure(rate, rate, rate)) for size, rate in ((10, 100.0), (20, 50.0))]
        assert bandwidth_at(points, 1) == 100
        assert bandwidth_at(points, 2**15) == 75
        assert bandwidth_at(points, 2**30) == bandwidth_at(points, None) == 50
        assert bandwidth_at([], 1) is None

    def test_json_round_trip(self):
        assert Ceilings.from_json(DEVICE.to_json()) == DEVICE

    @pytest.mark.parametrize(
        "damage",
        [
            lambda d: d.pop("read"),
            lambda d: d.update(format=99),
            lambda d: d.update(launch_ns={"median": 0, "low": 0, "high": 0}),
            lambda d: d.update(launch_ns={"median": float("nan"), "low": 1, "high": 1}),
            lambda d: d.update(launch_ns="soon"),
            lambda d: d.update(matmul=[1]),
            lambda d: d.update(device=None),
            lambda d: d["read"].append({"working_set_bytes": 1}),
        ],
    )
    def test_what_is_no_ceilings_is_refused(self, damage):
        document = DEVICE.to_json()
        damage(document)
        with pytest.raises(ValueError, match=r"."):
            Ceilings.from_json(document)

    @pytest.mark.parametrize("document", [None, 3, [], "x", {}])
    def test_nor_is_anything_else(self, document):
        with pytest.raises(ValueError, match=r"."):
            Ceilings.from_json(document)

    def test_of_a_manifest_the_stored_ones_come_first(self):
        meta = {"ceilings": DEVICE.to_json(), "device": {"name": "NVIDIA L4", "type": "cuda"}}
        assert of_manifest(meta) == (DEVICE, None)
        assert of_manifest(meta | {"ceilings": None}) == (from_datasheet("NVIDIA L4"), None)
        found, note = of_manifest(meta | {"ceilings": {"format": 1}})
        assert found == from_datasheet("NVIDIA L4")
        assert "cannot be read" in note

    @pytest.mark.parametrize("meta", [{}, {"device": None}, {"device": "x"}, {"device": {"name": "NVIDIA H100"}}])
    def test_an_unknown_device_has_none(self, meta):
        found, note = of_manifest(meta)
        assert found is None
        assert "no ceilings" in note

    def test_of_two_measurements_the_faster_figures_are_kept(self):
        one = fake_ceilings(peak=GIGA, bandwidth=3 * GIGA, launch_ns=5.0)
        two = fake_ceilings(peak=2 * GIGA, bandwidth=GIGA, launch_ns=7.0, matvec=60 * GIGA)
        two = replace(two, quick=True, read=(*two.read, BandwidthPoint(9, Figure(8, 8, 8))))
        for found in (faster(one, two), faster(two, one)):
            assert found.peak_flops_per_s("float32") == 2 * GIGA
            assert [(p.working_set_bytes, p.bytes_per_s.median) for p in found.read] == [(1, 3 * GIGA), (9, 8)]
            assert found.matvec_bytes_per_s("float32", 1) == 60 * GIGA
            assert (found.launch_ns.median, found.quick) == (5, False)

    def test_of_two_measurements_the_quieter_counts(self):
        loud, quiet = Quietness(False, 0.1, 0.9, 1.0), Quietness(True, 0.2, 0.1, 1.0)
        found = faster(replace(DEVICE, quietness=quiet), replace(DEVICE, quietness=loud))
        assert found.quietness == quiet
        assert faster(DEVICE, DEVICE) == DEVICE

    def test_datasheet(self):
        found = from_datasheet("NVIDIA L4")
        assert "NVIDIA L4 datasheet" in found.source
        assert found.peak_flops_per_s("bfloat16") == 121e12
        assert found.read_bytes_per_s(12345) == 300e9
        assert (found.launch_ns, found.measured) == (None, False)
        assert found.matvec_bytes_per_s("float16", 1) is found.linear_flops_per_s("float16", 1) is None
        assert Ceilings.from_json(found.to_json()) == found


class TestTraces:
    def test_phases(self, tmp_path):
        trace = read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE))
        prefill, decode = phase_verdicts(trace, DEVICE)
        assert (prefill.verdict.bound, prefill.verdict.compute_ns, prefill.verdict.memory_ns) == (
            "compute", 20 * MS, 5 * MS,
        )  # fmt: skip
        assert (prefill.mfu, prefill.mbu, prefill.verdict.efficiency) == (0.8, 0.2, 0.8)
        assert (prefill.tokens, prefill.steps, prefill.calls) == (100, 1, 1)
        # four steps: 4 · 5.01 + 0.01 · (0 + 1 + 2 + 3) ms of reading in 4 · 10 + 0.02 · 6 ms
        assert decode.verdict.bound == "memory"
        assert decode.verdict.memory_ns == pytest.approx(20.1 * MS)
        assert decode.verdict.launch_ns == 4 * 500 * 1_000
        assert decode.mbu == pytest.approx(20.1 / 40.12)
        assert decode.mfu == pytest.approx(0.8 / 40.12)

    def test_steps(self, tmp_path):
        found = step_verdicts(read_trace(prefill_and_decode(tmp_path)), DEVICE)
        assert [(row.step, row.verdict.bound) for row in found] == [
            (0, "compute"),
            *((i, "memory") for i in (1, 2, 3, 4)),
        ]
        assert found[1].verdict.memory_ns == pytest.approx(5.01 * MS)
        assert found[4].verdict.memory_ns == pytest.approx(5.04 * MS)

    def test_stages_sum_over_the_steps(self, tmp_path):
        prefill, decode = rooflines(read_trace(prefill_and_decode(tmp_path)), DEVICE)
        assert (prefill.stage, prefill.verdict.bound, prefill.work.flops) == ("layer", "compute", PREFILL_FLOPS)
        assert (decode.count, decode.verdict.bound, decode.work.flops) == (4, "memory", 4 * DECODE_FLOPS)
        assert decode.work.bytes_ == 4 * WEIGHTS + (101 + 102 + 103 + 104) * 1_000_000

    def test_two_calls_are_averaged(self, tmp_path):
        steps = [step(i, "prefill", 25, PREFILL_FLOPS, 0, 100, call=i, start_ms=30 * i) for i in (0, 1)]
        spans = [layer_span(i, steps[i], "prefill", 25, PREFILL_FLOPS) for i in (0, 1)]
        trace = read_trace(write_trace(tmp_path, {"steps": steps, "spans": spans}, model={"dtype": "float32"}))
        (stage,) = rooflines(trace, DEVICE)
        (phase,) = phase_verdicts(trace, DEVICE)
        assert stage.work.flops == phase.work.flops == PREFILL_FLOPS
        assert stage.time_ns == phase.time_ns == 25 * MS

    def test_warm_up_nested_and_discarded_steps_do_not_count(self, tmp_path):
        steps = [step(0, "prefill", 25, PREFILL_FLOPS, 0, 100)]
        left_out = ({"warmup": True}, {"discarded": True}, {"parent_step": 0})
        steps += [step(1 + i, "prefill", 99, 1, 0, **other) for i, other in enumerate(left_out)]
        trace = read_trace(write_trace(tmp_path, {"steps": steps}, model={"dtype": "float32"}))
        assert [row.step for row in step_verdicts(trace, DEVICE)] == [0]
        assert phase_verdicts(trace, DEVICE)[0].steps == 1

    def test_one_null_count_makes_the_row_unknown(self, tmp_path):
        steps = [step(i, "decode", 10, DECODE_FLOPS, 10 + i) for i in (0, 1)]
        spans = [layer_span(0, steps[0], "decode", 10, DECODE_FLOPS), layer_span(1, steps[1], "decode", 10, None)]
        steps[1]["flops"] = None
        trace = read_trace(write_trace(tmp_path, {"steps": steps, "spans": spans}, model={"dtype": "float32"}))
        assert rooflines(trace, DEVICE)[0].verdict.bound == "unknown"
        assert phase_verdicts(trace, DEVICE)[0].verdict.bound == "unknown"
        assert [row.verdict.bound for row in step_verdicts(trace, DEVICE)] == ["memory", "unknown"]

    def test_device_time_is_taken_where_there_is_one(self, tmp_path):
        steps = [step(0, "decode", 10, DECODE_FLOPS, 10)]
        spans = [layer_span(0, steps[0], "decode", 2, DECODE_FLOPS, device_ns=8 * MS, starved=True)]
        trace = read_trace(write_trace(tmp_path, {"steps": steps, "spans": spans}, model={"dtype": "float32"}))
        (stage,) = rooflines(trace, fake_ceilings(type_="cuda"))
        assert (stage.time_ns, stage.work.starved_share, stage.verdict.bound) == (8 * MS, 1.0, "launch")

    def test_parts_and_what_is_between_them(self, tmp_path):
        steps = [step(0, "decode", 10, DECODE_FLOPS, 10)]
        spans = [
            layer_span(0, steps[0], "decode", 10, DECODE_FLOPS),
            layer_span(1, steps[0], "decode", 7, DECODE_FLOPS, parent=0, part="mlp", op_count=450),
        ]
        trace = read_trace(write_trace(tmp_path, {"steps": steps, "spans": spans}, model={"dtype": "float32"}))
        _, mlp, own = rooflines(trace, DEVICE)
        assert (mlp.part, mlp.time_ns, mlp.verdict.bound) == ("mlp", 7 * MS, "memory")
        assert (own.part, own.time_ns, own.work.flops, own.work.op_count) == ("own", 3 * MS, 0, 50)
        assert own.verdict.bound == "unknown"


class TestJudge:
    def test_statements_say_bound_numbers_and_confidence(self, tmp_path):
        prefill, decode = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE))).statements
        assert prefill.bound == "compute"
        assert "100 tokens needs 20.0 GFLOP, 20.0 ms at 1.00 TFLOP/s" in prefill.sentence
        assert "80% of its roof" in prefill.sentence
        assert (prefill.confidence, prefill.doubts) == ("medium", ("1 step only",))
        assert decode.sentence.startswith("Decode is memory-bound: a step of 1 token moves 502 MB")
        assert decode.confidence == "high"

    def test_launch_bound_names_what_would_help(self, tmp_path):
        found = judge(read_trace(prefill_and_decode(tmp_path, ceilings=fake_ceilings(launch_ns=12_000.0))))
        assert [row.bound for row in found.statements] == ["compute", "launch"]
        assert "500 operators, 6.00 ms at 12.0 µs each" in found.statements[1].sentence
        assert "static cache" in found.statements[1].sentence

    def test_losses_are_ranked_and_have_a_reason(self, tmp_path):
        losses = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE))).losses
        assert [(row.phase, row.stage) for row in losses] == [("decode", "layer"), ("prefill", "layer")]
        assert losses[0].lost_ns == pytest.approx((40.12 - 20.1) * MS)
        assert losses[0].share_of_phase == pytest.approx(20.02 / 40.12)
        assert "matrix–vector products reach less than reading on this device" in losses[0].reason

    def test_a_reason_for_each_part(self, tmp_path):
        def reason(ceilings, name):
            return judge(read_trace(prefill_and_decode(tmp_path / name, ceilings=ceilings))).losses[0].reason

        assert "500" not in reason(DEVICE, "a")
        assert "2,000 operators" in reason(fake_ceilings(matvec=100 * GIGA, launch_ns=4_000.0), "b")
        assert "static cache" in reason(fake_ceilings(matvec=100 * GIGA, copy=50 * GIGA, launch_ns=1.0), "c")
        bare = fake_ceilings(matvec=100 * GIGA, copy=5000 * GIGA, launch_ns=1.0)
        assert "no measured figure explains it" in reason(bare, "d")

    def test_thresholds(self, tmp_path):
        found = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE))).thresholds
        # A decode sequence: 0.2 ms of FLOPs, over 1 ms of KV: no batch makes it compute-bound.
        assert found.decode_batch is None
        # A prompt token: 0.2 ms of FLOPs, 0.01 ms of KV written: 4 ms ÷ 0.19 ms.
        assert found.prefill_length == 22
        assert found.kv_context == 400

    def test_growth(self, tmp_path):
        """20 µs a position measured: 10 of reading 1 MB at 100 B/ns, 10 of copying 2 MB at 200 B/ns."""
        found = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE))).growth
        assert found.slope_us_per_1000 == pytest.approx(20_000)
        assert found.error_us_per_1000 == pytest.approx(0, abs=1e-6)
        assert found.kv_read_share == pytest.approx(0.5)
        assert found.kv_copy_share == pytest.approx(0.5)

    def test_a_fault_lowers_the_confidence(self, tmp_path):
        slow = fake_ceilings(bandwidth=20 * GIGA, matvec=20 * GIGA)
        decode = judge(read_trace(prefill_and_decode(tmp_path, ceilings=slow))).statements[1]
        assert decode.confidence == "low"
        assert "times its roof" in decode.doubts[0]

    def test_a_datasheet_is_named_and_trusted_less(self, tmp_path):
        device = {"type": "cuda", "name": "NVIDIA L4"}
        found = judge(read_trace(prefill_and_decode(tmp_path, device=device)))
        assert found.ceilings_source == "datasheet: NVIDIA L4 datasheet, figures with sparsity halved (L4)"
        assert "the ceilings are a datasheet's, not measured" in found.statements[0].doubts

    def test_unknown_device(self, tmp_path):
        found = judge(read_trace(prefill_and_decode(tmp_path)))
        assert [row.bound for row in found.statements] == ["unknown", "unknown"]
        assert "no ceilings are known for its device" in found.statements[0].sentence
        assert (found.ceilings_source, found.losses) == (None, [])
        assert found.thresholds.kv_context == 400  # of counts alone
        assert found.growth.kv_read_share is None
        assert found.notes

    def test_prefill_only(self, tmp_path):
        found = judge(read_trace(prefill_and_decode(tmp_path, decode_steps=0, ceilings=DEVICE)))
        assert [row.phase for row in found.statements] == ["prefill"]
        assert (found.growth, found.thresholds.decode_batch, found.thresholds.kv_context) == (None, None, None)
        assert found.thresholds.prefill_length == 22
        assert found.stage("decode", "layer") is None

    @pytest.mark.parametrize("ceilings", [DEVICE, None])
    def test_trace_without_counts_or_head(self, tmp_path, ceilings):
        trace = read_trace(one_call(tmp_path))
        trace.meta["ceilings"] = ceilings.to_json() if ceilings else None
        found = judge(trace)
        assert {row.verdict.bound for row in found.stages} == {"unknown"}
        assert len(found.stages) == 9

    def test_empty_trace(self, tmp_path):
        found = judge(read_trace(write_trace(tmp_path, {})))
        assert (found.statements, found.phases, found.stages, found.losses) == ([], [], [], [])

    def test_experts_draw_no_line(self, tmp_path):
        model = {"dtype": "float32", "config": {"num_local_experts": 8}}
        found = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE, model=model)))
        assert (found.thresholds.decode_batch, found.thresholds.prefill_length) == (None, None)

    def test_json_holds_each_bound_as_a_word(self, tmp_path):
        import json

        document = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE))).to_json()
        assert [row["bound"] for row in document["phases"]] == ["compute", "memory"]
        assert [row["bound"] for row in document["stages"]] == ["compute", "memory"]
        assert document["stages"][0]["bytes"] == 500_000_000
        assert json.loads(json.dumps(document, allow_nan=False)) == document

    def test_a_machine_that_was_not_quiet(self, tmp_path):
        loud = replace(DEVICE, quietness=Quietness(False, 0.5, 1.0, 2.0))
        decode = judge(read_trace(prefill_and_decode(tmp_path, ceilings=loud))).statements[1]
        assert (decode.bound, decode.confidence) == ("memory", "low")


class TestView:
    def test_lead_rows(self, tmp_path):
        rows = dict(lead_rows(judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE)))))
        assert rows["prefill"].endswith("Confidence: medium: 1 step only.")
        assert rows["lost time 1"].startswith("decode layer: 20.0 ms of 40.1 ms a call, 49.9% of the phase; ")
        assert rows["turning points"] == (
            "prefill turns compute-bound at a prompt of 22 tokens; "
            "a step reads more KV than weights from 400 positions on"
        )
        assert "20,000 µs more for 1,000 positions" in rows["with context"]
        assert "explains 50%, the cache's own copying 50%" in rows["with context"]
        assert rows["device used"].startswith("prefill MFU 80.0%, MBU 20.0%; decode MFU 2.0%")
        assert rows["ceilings"] == "measured by lifetrace calibrate"

    def test_lead_rows_of_an_unknown_device(self, tmp_path):
        rows = dict(lead_rows(judge(read_trace(prefill_and_decode(tmp_path)))))
        assert set(rows) == {"prefill", "decode", "turning points", "with context"}

    def test_cells(self, tmp_path):
        found = judge(read_trace(prefill_and_decode(tmp_path, ceilings=DEVICE)))
        assert bound_cell(found.stage("prefill", "layer")) == "compute 80%"
        assert bound_cell(found.stage("decode", "layer")) == "memory 50%"
        assert bound_cell(None) == "–"

    def test_no_efficiency_above_the_roof_goes_unflagged(self, tmp_path):
        found = judge(read_trace(prefill_and_decode(tmp_path, ceilings=fake_ceilings(peak=500 * GIGA))))
        assert bound_cell(found.stage("prefill", "layer")) == "compute 160% (!)"


class TestThresholds:
    def test_decode_batch(self):
        """W ÷ bandwidth = 100 ns; a sequence takes 12 − 2 ns more in compute than in memory: 10."""
        assert decode_batch(12_000, 200, 10_000, peak=1000 * GIGA, bandwidth=100 * GIGA) == 10
        assert decode_batch(1_000, 200, 10_000, peak=1000 * GIGA, bandwidth=100 * GIGA) is None

    def test_prefill_length_without_attention(self):
        length = prefill_length(12_000, 0, 0, 200, 10_000, 1, 1000 * GIGA, 100 * GIGA)
        assert length == 10
        assert prefill_length(1_000, 0, 0, 200, 10_000, 1, 1000 * GIGA, 100 * GIGA) is None

    def test_attention_brings_it_nearer(self):
        """100 + 2 n ns of memory; 12 n + n(n+1)/2 ns of compute: 94 and 104 at 7 and 116, 116 at 8."""
        assert prefill_length(12_000, 1_000, 0, 200, 10_000, 1, 1000 * GIGA, 100 * GIGA) == 8

    def test_a_batch_shares_the_weights(self):
        assert prefill_length(12_000, 0, 0, 200, 10_000, 5, 1000 * GIGA, 100 * GIGA) == 2

    def test_kv_context_of_a_window_is_unknown(self):
        steps = [{"kv_read_bytes": r, "kv_len_before": n, "weight_bytes": 1000} for r, n in ((100, 10), (100, 20))]
        assert kv_context(steps) is None
        assert kv_context(steps[:1]) == 100
        assert kv_context([]) is None

    def test_line(self):
        assert line([(0, 1), (1, 3), (2, 5)]) == (2, 0)
        slope, error = line([(0, 0), (1, 3), (2, 0), (3, 3)])
        assert slope == pytest.approx(0.6)
        # residual² = 7.2; ÷ (4 − 2) ÷ 5, root
        assert error == pytest.approx((7.2 / 2 / 5) ** 0.5)


def test_a_machine_that_was_not_quiet_leaves_little_confidence(tmp_path):
    """Equal untraced runs that differ by half make every time doubtful; by a tenth they do not."""
    decode = phase_verdicts(read_trace(prefill_and_decode(tmp_path)), DEVICE)[1]
    noisy, quiet = statement(decode, DEVICE, noise=1.5), statement(decode, DEVICE, noise=1.1)
    assert (noisy.confidence, noisy.doubts[0]) == ("low", "equal untraced runs differ by 50%")
    assert (noisy.bound, noisy.sentence) == (quiet.bound, quiet.sentence)
    assert quiet == statement(decode, DEVICE)
    assert quiet.confidence != "low"
