"""A signature is replayed on a meta copy, or really run once more where code looks into values."""

import pytest
import torch

from lifetrace.hooks.kvcache import LayerKV
from lifetrace.hooks.recorder import Signature
from lifetrace.hooks.replay import Replayer, ReplayError, meta_copy
from tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # what the library's models warn of is not at issue

PREFILL = Signature(1, 12, (), None, 0, 1, masked=True, embeds=False, use_cache=True)
DECODE = Signature(1, 1, (), "DynamicCache", 12, 1, masked=True, embeds=False, use_cache=True)


def test_a_meta_copy_holds_no_memory_and_no_hooks(model_r):
    model_r.register_forward_hook(lambda module, args, output: None)
    copy = meta_copy(model_r)
    assert all(tensor.device.type == "meta" for tensor in (*copy.parameters(), *copy.buffers()))
    assert len(copy._forward_hooks) == 0
    assert copy.model.embed_tokens is not model_r.model.embed_tokens
    assert len(model_r._forward_hooks) == 1


def test_replay_on_meta(model_r):
    replayer = Replayer(model_r)
    assert replayer.count(PREFILL, 0).flops_dense() == 3_719_168
    assert replayer.count(DECODE, 12).flops_dense() == 340_992
    assert replayer.real_runs == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_looks_into_values_is_really_run_and_leaves_no_trace(attention):
    """These experts are chosen by `nonzero`, whose result has no shape without values."""
    model = tiny_model("dbrx", attn_implementation=attention)
    state = torch.get_rng_state()
    replayer = Replayer(model)
    prefill = replayer.count(PREFILL, 0)
    assert replayer.real_runs == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == attention
    assert not any(module._forward_hooks for module in model.modules())
    hidden, heads, head, kv_heads, experts, active, width, layers, vocabulary = 64, 4, 16, 2, 4, 2, 96, 4, 128
    projections = hidden * (heads + 2 * kv_heads) * head + hidden * hidden
    per_token = projections + hidden * experts + active * 3 * hidden * width
    pairs = 12 * 12
    dense = layers * (2 * 12 * per_token + 2 * 2 * heads * head * pairs) + 2 * hidden * vocabulary
    assert prefill.flops_dense() == dense
    hidden_pairs = pairs - 12 * 13 // 2
    flops = sum(product.flops for product in prefill.root.products())
    assert flops == dense - layers * 2 * 2 * heads * head * hidden_pairs


def test_work_that_depends_on_the_tokens_is_not_guessed():
    """Some of these experts do nothing, and the tokens choose them."""
    with pytest.raises(ReplayError, match="depends on the tokens"):
        Replayer(tiny_model("longcat_flash")).count(PREFILL, 0)


def test_a_cache_that_cannot_be_made_again_is_not_replaced_by_another(model_r):
    state = LayerKV("state", 0, 4096, 0, "float32", "cpu")
    strange = Signature(1, 1, (state,) * 4, "DynamicCache", 12, 1, masked=True, embeds=False, use_cache=True)
    with pytest.raises(ReplayError, match="cannot be filled"):
        Replayer(model_r).count(strange, 12)
