"""`--ops`: operators of a few steps, from a pass of their own, attributed to where they ran."""

from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.autograd import DeviceType
from transformers import cache_utils
from transformers.models.llama import modeling_llama

import lifetrace
from lifetrace.cli import main
from lifetrace.hooks import kernels
from lifetrace.stage_ops import chosen_steps


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [(1, {0}), (2, {0, 1}), (3, {0, 1}), (5, {0, 1, 2, 3}), (64, {0, 1, 31, 62})],
)
def test_the_prefill_and_decode_steps_spread_over_the_call(steps, chosen):
    assert chosen_steps(steps) == chosen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ops") / "t"
    arguments = ["run", "--ops", "--max-new-tokens", "6", "--repeats", "2", "--no-report", "--out", str(path)]
    ran = CliRunner().invoke(main, arguments, env={"COLUMNS": "120"})
    assert ran.exit_code == 0, ran.output
    assert "operators of the profiled steps" in ran.output
    return path


def counts(ops, **place):
    for name, value in place.items():
        ops = ops[ops[name] == value]
    return ops.groupby("op")["count"].sum().to_dict()


def test_operators_stand_where_they_ran(folder):
    """A decode step of the embedded Llama, layer 2: every operator of a kind is where the model's code puts it."""
    trace = lifetrace.read_trace(folder)
    ops = trace.ops[(trace.ops.step == 3) & (trace.ops.layer == 2)]
    assert counts(ops, part="qkv")["aten::mm"] == 3
    assert counts(ops, part="out_proj")["aten::mm"] == 1
    assert counts(ops, part="gate_up")["aten::mm"] == 2
    assert counts(ops, part="down")["aten::mm"] == 1
    assert counts(ops, part="cache_append")["aten::cat"] == 2  # keys, values
    rotary = counts(ops, part="rotary")  # of queries and keys: two products and a sum each, half turned and joined
    assert (rotary["aten::mul"], rotary["aten::add"], rotary["aten::neg"], rotary["aten::cat"]) == (4, 2, 2, 2)
    assert counts(ops, part="attention_core")["aten::scaled_dot_product_attention"] == 1
    assert counts(ops, part="norm")["aten::rsqrt"] == 2
    assert counts(ops, part="activation")["aten::silu"] == 1
    assert sum(row.op == "aten::mm" for row in trace.ops[trace.ops.step == 3].itertuples()) > 0


def test_profiled_steps_are_those_chosen_and_in_no_statistics(folder):
    trace = lifetrace.read_trace(folder)
    assert set(trace.ops.step) == {0, 1, 3, 4}
    assert len(trace.steps) == 2 * 6
    assert trace.meta["overhead"]["tokens_identical"]
    phases = trace.ops.groupby("step").phase.unique()
    assert phases[0].tolist() == ["prefill"]
    assert phases[1].tolist() == ["decode"]
    assert trace.ops.device_ns.isna().all()
    assert trace.ops.kernel.isna().all()


def test_a_trace_without_ops_has_an_empty_table(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=2)
    assert len(trace.ops) == 0
    assert not (tmp_path / "t" / "ops").exists()


def test_eager_softmax_has_a_part_of_its_own(prompt_12, tmp_path):
    path = tmp_path / "t"
    arguments = ["run", "--ops", "--attn-implementation", "eager", "--max-new-tokens", "3", "--no-report", "--repeats"]
    assert CliRunner().invoke(main, [*arguments, "1", "--no-baseline", "--out", str(path)]).exit_code == 0
    ops = lifetrace.read_trace(path).ops
    inside = ops[(ops.layer == 0) & (ops.step == 1)]
    assert counts(inside, part="softmax")["aten::_softmax"] == 1
    assert counts(inside, part="attention_core")["aten::bmm"] == 2


def on_device(start, end, is_user_annotation=False):
    where = {"device_type": DeviceType.CUDA, "is_user_annotation": is_user_annotation}
    return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), **where)


def test_a_label_around_kernels_keeps_no_device_busy():
    """Kernels of 0 to 2 and 5 to 6 µs, and a label around both: 3 µs of nothing."""
    events = [on_device(0, 2), on_device(5, 6), on_device(0, 6, is_user_annotation=True)]
    assert kernels._idle_ns(events) == 3000


def test_a_class_whose_python_module_is_gone_is_labelled_nowhere():
    lost = type("Lost", (nn.Module,), {"__module__": "made_by_exec"})
    with kernels.labels(lost()):
        pass


def test_labels_leave_nothing_behind(model_r):
    before = (modeling_llama.apply_rotary_pos_emb, cache_utils.Cache.update)
    with kernels.labels(model_r):
        assert modeling_llama.apply_rotary_pos_emb is not before[0]
    assert (modeling_llama.apply_rotary_pos_emb, cache_utils.Cache.update) == before
    assert not torch.autograd._profiler_enabled()
