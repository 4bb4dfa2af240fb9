"""Every causal-LM type of the installed transformers: lifecycle, tokens and counts of a tiny random model.

The counts are compared with torch's own FlopCounterMode around the real forwards of `generate`,
the pairs that causality and windows let through with the model's own attention maps.
"""

from fractions import Fraction

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lifetrace
import tiny_models
from lifetrace.hooks.recorder import Signature
from lifetrace.hooks.replay import Replayer
from tiny_models import (
    CACHE_ROWS,
    EMPTY_CACHE,
    LAYERS,
    NO_FINAL_NORM,
    NO_MAPS,
    NOT_BUILT,
    NOT_COUNTED,
    TYPES,
    tiny_model,
)

NEW_TOKENS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what the library and its models warn of is not at issue
    pytest.mark.skipif(
        tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
        reason="the walk is of the types of transformers 5.24; some of them were others before",
    ),
]


def test_nearly_all_types_are_built():
    left_out = [name for name in NOT_BUILT if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert len(TYPES) + len(left_out) == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(left_out) <= 3


def generate(model):
    torch.manual_seed(0)
    return model.generate(tiny_models.prompt(model), max_new_tokens=NEW_TOKENS, do_sample=False)


def hook_count(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type(model_type, tmp_path):
    model = tiny_model(model_type)
    untraced = generate(model)
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        traced = generate(model)
    assert torch.equal(untraced, traced)
    assert hook_count(model) == 0
    assert trace.meta["status"] == "complete"
    assert trace.meta["model"]["parameters"] == sum(parameter.numel() for parameter in set(model.parameters()))
    assert trace.steps.phase.tolist() == ["prefill"] + ["decode"] * (NEW_TOKENS - 1)
    for step in trace.steps.step:
        check_lifecycle(model_type, model, trace.spans[trace.spans.step == step])
    rows = trace.kv.groupby("step").size()
    assert set(rows) == ({CACHE_ROWS.get(model_type, LAYERS)} - {0})
    assert ((trace.kv.groupby("step").logical_bytes.sum() > 0) != (model_type in EMPTY_CACHE)).all()
    check_counts(model_type, trace)


def check_lifecycle(model_type, model, spans):
    """The stages of a step: what embeds, all layers in their order, the norm behind them, the head."""
    top = spans[spans.parent.isna()]
    layers = top[(top.stage == "layer") & top.part.isna()]
    assert layers.layer.tolist() == tiny_models.special_layers(model_type)
    embedding = model.get_input_embeddings()
    embedding = embedding[0] if isinstance(embedding, torch.nn.ModuleList) else embedding
    names = {module: name for name, module in model.named_modules()}
    assert names[embedding] in set(top[top.stage == "embed"].module)
    last_layer_end = (layers.start_ns + layers.host_ns).max()
    heads, norms = top[top.stage == "lm_head"], top[top.stage == "final_norm"]
    assert len(heads) == getattr(model, "num_codebooks", 1)
    assert (heads.start_ns >= last_layer_end).all()
    assert (len(norms) == 0) == (model_type in NO_FINAL_NORM)
    assert (norms.start_ns >= last_layer_end).all()


def check_counts(model_type, trace):
    steps, spans = trace.steps, trace.spans
    uncounted, _ = NOT_COUNTED.get(model_type, ((), ""))
    assert steps.step[steps.flops_dense.isna()].tolist() == list(uncounted)
    counted = steps[~steps.step.isin(uncounted)]
    reference = real_flops(model_type)
    assert counted.flops_dense.tolist() == [reference[step] for step in counted.step]
    assert (counted.flops <= counted.flops_dense).all()
    parts = spans[spans.parent.isna() & ~spans.step.isin(uncounted)].groupby("step").flops_dense.sum()
    assert parts.tolist() == counted.flops_dense.tolist()


def real_flops(model_type):
    """FLOPs of each forward of a generate, counted by torch while it really runs, eager in all it does."""
    model = tiny_model(model_type, attn_implementation="eager").requires_grad_(False)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
            module.config._experts_implementation = "eager"
    counters = []

    def begin(module, args):
        counters.append(FlopCounterMode(display=False))
        counters[-1].__enter__()

    def end(module, args, output):
        counters[-1].__exit__(None, None, None)

    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    generate(model)
    for handle in handles:
        handle.remove()
    return [counter.get_total_flops() - rotary_flops(counter) for counter in counters]


def rotary_flops(counter):
    """Older transformers write the outer product of rotary angles as a matrix product; it adds nothing up."""
    by_module = counter.get_flop_counts()
    return sum(sum(ops.values()) for name, ops in by_module.items() if "rotary" in name.rpartition(".")[2])


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in NO_MAPS and name not in NOT_COUNTED])
def test_the_pairs_let_through_are_those_of_the_attention_maps(model_type):
    model = tiny_model(model_type, attn_implementation="eager")
    ids = tiny_models.prompt(model)
    with torch.no_grad():
        output = model(ids, output_attentions=True, return_dict=True)
    maps = [map_ for map_ in output.get("attentions") or () if isinstance(map_, torch.Tensor)]
    if not maps:
        pytest.skip("gives no attention maps")
    signature = Signature(ids.shape[0], ids.shape[1], (), None, 0, 1, masked=True, embeds=False, use_cache=True)
    calls = Replayer(model).count(signature, 0).root.walk()
    products = [[product for product in call.own if product.attention] for call in calls]
    counted = sorted(Fraction(*own[0].pairs_fraction) for own in products if own)
    assert counted == sorted(Fraction(int((map_[0, 0] > 0).sum()), map_[0, 0].numel()) for map_ in maps)
