"""Live bytes of operators whose tensors are counted by hand."""

import pytest
import torch
from torch import nn

from lifetrace.hooks import kvcache
from lifetrace.hooks.live_bytes import LiveBytes


class Doubler(nn.Module):
    """Makes two tensors as large as its input and keeps one of them: [n] → [n]."""

    def forward(self, x):
        wide = torch.cat([x, x])
        return wide[: len(x)] + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self.inner = Doubler()

    def forward(self, x):
        return self.inner(x) * self.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_peak_and_its_tensors(device):
    net, x = Net().to(device), torch.ones(10, device=device)
    with torch.no_grad(), LiveBytes(net) as live:
        output = net(x)
    # 40 B each: the weight, x, the sum; 80 B of the concatenation, gone before the product is made
    assert live.initial_bytes == 40
    peak = live.peak
    assert peak.bytes_ == 40 + 40 + 80 + 40
    assert [(t.role, t.bytes_, t.shape, t.operator) for t in peak.tensors] == [
        ("made", 80, (20,), "aten.cat"),
        ("weight", 40, (10,), None),
        ("given", 40, (10,), None),
        ("made", 40, (10,), "aten.add"),
    ]
    assert (peak.module, peak.call_index, peak.maker.operator) == ("inner", 0, "aten.add")
    assert sum(peak.bytes_of(role) for role in ("weight", "kv", "given", "made")) == peak.bytes_
    assert [(c.module, c.before_bytes, c.peak_bytes, c.after_bytes) for c in live.calls] == [
        ("inner", 40, 200, 120),
        ("", 40, 200, 120),
    ]
    assert [(t.operator, t.bytes_) for t in live.held] == [(None, 40), ("aten.mul", 40)]
    assert live.operators == 4  # cat, slice, add, mul
    del output
    assert [t.operator for t in live.held] == [None]


def test_views_count_once_and_resizing_counts():
    with LiveBytes(nn.Identity()) as live:
        x = torch.ones(100)
        views = [x[:50], x.view(10, 10)]
        assert live.now_bytes == 400
        x.resize_(300)
        assert live.now_bytes == 1200
        del x, views
        assert live.now_bytes == 0
    assert live.peak.bytes_ == 1200


def test_steps_and_cache(model_r, prompt_12):
    with LiveBytes(model_r) as live:
        output = model_r.generate(prompt_12, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert [peak.step for peak in live.peaks] == [0, 1, 2]
    assert {call.step for call in live.calls} == {0, 1, 2}
    held = sum(layer.allocated_bytes for layer in kvcache.read(output.past_key_values))
    assert sum(tensor.bytes_ for tensor in live.held if tensor.role == "kv") == held == 14 * 4 * 2 * 2 * 16 * 4
    # a growing cache holds one layer's keys and values twice while it appends: 13 old, 14 new positions
    last = live.peaks[-1]
    assert last.bytes_of("kv") <= held + 13 * 2 * 2 * 16 * 4
    layers = [call for call in live.calls if call.module == "model.layers.2" and call.step == 1]
    assert len(layers) == 1
    assert layers[0].after_bytes >= layers[0].before_bytes
    assert layers[0].peak_bytes >= layers[0].after_bytes


def test_a_call_that_raises_leaves_no_hooks_and_ends_its_calls(model_r, prompt_12):
    def explode(*_):
        raise ValueError("no")

    handle = model_r.model.layers[1].mlp.register_forward_pre_hook(explode)
    live = LiveBytes(model_r)
    with pytest.raises(ValueError, match="no"), live:
        model_r(prompt_12)
    handle.remove()
    assert {"", "model.layers.1"} <= {call.module for call in live.calls}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model_r.modules())


def test_tokens_are_the_same(model_r, prompt_12):
    plain = model_r.generate(prompt_12, max_new_tokens=5, do_sample=False)
    with LiveBytes(model_r):
        followed = model_r.generate(prompt_12, max_new_tokens=5, do_sample=False)
    assert torch.equal(plain, followed)
