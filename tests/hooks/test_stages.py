"""The lifecycle is found by structure alone; each model here is small and its stages are known."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import lifetrace
from lifetrace.hooks import stages
from tiny_models import TYPES, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


@pytest.fixture
def stages_of(tmp_path):
    """Gives (stage, module) of the modules at the top of the first step of a generate."""

    def trace(model, tokens=2, **settings):
        with lifetrace.trace(model, out=tmp_path / "t", **settings) as run:
            model.generate(torch.arange(3, 9)[None], max_new_tokens=tokens, do_sample=False)
        top = run.spans[(run.spans.step == 0) & run.spans.parent.isna() & run.spans.module.notna()]
        return list(zip(top.stage, top.module, strict=True)), top

    return trace


def layers(prefix, count=4):
    return [("layer", f"{prefix}.{number}") for number in range(count)]


def test_llama(model_r, stages_of):
    assert stages_of(model_r)[0] == [
        ("embed", "model.embed_tokens"),
        ("other", "model.rotary_emb"),
        *layers("model.layers"),
        ("final_norm", "model.norm"),
        ("lm_head", "lm_head"),
    ]


def test_parts_of_a_layer(model_r):
    places = stages.find(model_r).places
    layer = "model.layers.2"
    assert places[layer] == stages.Place("layer", 2)
    assert places[f"{layer}.input_layernorm"].part == "norm"
    assert places[f"{layer}.self_attn"].part == "attention"
    assert places[f"{layer}.mlp"].part == "mlp"
    assert places[f"{layer}.mlp.down_proj"].matrix
    assert not places[f"{layer}.mlp.act_fn"].matrix


def test_two_norms_are_both_final(stages_of):
    """One norm behind the layers, another between two matrices of the head."""
    found, _ = stages_of(tiny_model("roberta-prelayernorm"))
    assert found[-4:] == [
        ("final_norm", "roberta_prelayernorm.LayerNorm"),
        ("other", "lm_head.dense"),
        ("final_norm", "lm_head.layer_norm"),
        ("lm_head", "lm_head.decoder"),
    ]


def test_no_norm(stages_of):
    """GPT-1 ends each layer with its norm and has none of its own behind them."""
    found, _ = stages_of(tiny_model("openai-gpt"))
    assert found[-5:] == [*layers("transformer.h"), ("lm_head", "lm_head")]


def test_a_norm_before_the_layers_is_not_final(stages_of):
    found, _ = stages_of(tiny_model("bloom"))
    assert ("other", "transformer.word_embeddings_layernorm") in found
    assert ("final_norm", "transformer.ln_f") in found


def test_a_transform_before_the_head_is_opened_for_its_norm(stages_of):
    found, _ = stages_of(tiny_model("bert"))
    transform = "cls.predictions.transform"
    assert found[-4:] == [
        ("other", f"{transform}.dense"),
        ("other", f"{transform}.transform_act_fn"),
        ("final_norm", f"{transform}.LayerNorm"),
        ("lm_head", "cls.predictions.decoder"),
    ]


def test_conv1d_of_gpt2(stages_of):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
    model.generation_config.eos_token_id = None
    found, _ = stages_of(model, detail="module")
    assert found == [
        ("embed", "transformer.wte"),
        ("embed", "transformer.wpe"),
        ("other", "transformer.drop"),
        *layers("transformer.h", 2),
        ("final_norm", "transformer.ln_f"),
        ("lm_head", "lm_head"),
    ]
    assert stages.find(model).places["transformer.h.0.attn.c_attn"].matrix


def test_projections_around_a_narrow_embedding(stages_of):
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=64, word_embed_proj_dim=8, max_position_embeddings=32, **sizes)
    config.eos_token_id = None
    found, _ = stages_of(OPTForCausalLM(config).eval())
    decoder = "model.decoder"
    assert found == [
        ("embed", f"{decoder}.embed_tokens"),
        ("embed", f"{decoder}.embed_positions"),
        ("other", f"{decoder}.project_in"),
        *layers(f"{decoder}.layers", 2),
        ("final_norm", f"{decoder}.final_layer_norm"),
        ("other", f"{decoder}.project_out"),
        ("lm_head", "lm_head"),
    ]


@pytest.mark.parametrize("model_type", ["gemma3", "git", "phi4_multimodal"])
def test_the_text_tower_not_the_vision_tower(model_type, stages_of):
    model = tiny_model(model_type)
    lifecycle = stages.find(model)
    assert len(lifecycle.layers) == 4
    assert not any(word in name for name in lifecycle.layers for word in ("vision", "image", "audio"))
    assert [stage for stage, _ in stages_of(model)[0]].count("layer") == 4


@pytest.mark.skipif("dory" not in TYPES, reason="this transformers has no model whose layers loop")
def test_each_execution_of_a_looped_layer_counts(stages_of):
    """One layer, two in a loop that runs twice, one layer: six executions of four layers."""
    _, top = stages_of(tiny_model("dory"))
    executed = top[top.stage == "layer"]
    assert [int(name[-1]) for name in executed.module] == [0, 1, 2, 1, 2, 3]
    assert executed.layer.tolist() == [0, 1, 2, 3, 4, 5]
    assert executed.call_index.tolist() == [0, 0, 0, 1, 1, 0]


def test_two_stacks_of_one_kind_of_layer_are_both_decoder_layers():
    names = stages.find(tiny_model("hrm_text")).layers
    assert [name.rpartition(".layers.")[0] for name in names] == ["model.L_module"] * 4 + ["model.H_module"] * 4


def test_a_skipped_layer_leaves_its_number_out(stages_of):
    """Layer 1 of this one attends to an image; without an image it is not run, and its cache slot is empty."""
    _, top = stages_of(tiny_model("mllama"))
    assert top[top.stage == "layer"].layer.tolist() == [0, 2, 3]


def test_attentions_in_a_list_inside_a_layer(tmp_path):
    """Two attentions and two MLPs in a layer, each in a list: all are marked at block detail."""
    model = tiny_model("longcat_flash")
    with lifetrace.trace(model, out=tmp_path / "t") as run:
        model.generate(torch.arange(3, 9)[None], max_new_tokens=1, do_sample=False)
    first = run.spans[(run.spans.layer == 0) & run.spans.part.notna()]
    assert (first.part == "attention").sum() == 2
    assert {"model.layers.0.self_attn.0", "model.layers.0.self_attn.1"} <= set(first.module)


def test_encoder_decoders_are_refused(tmp_path):
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(lifetrace.ModelError, match="encoder–decoder"):
        stages.find(T5ForConditionalGeneration(config))
