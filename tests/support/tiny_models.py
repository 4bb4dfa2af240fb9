"""Builds a tiny random model of every causal-LM type that the installed transformers has.

A config is made small by rules on the names of its attributes; lists with one entry a layer
are thinned so that each kind of layer stays. What the rules cannot know stands in `OVERRIDES`.
"""

import copy
import warnings
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS, HEADS, HEAD_WIDTH, VOCABULARY, POSITIONS = 4, 4, 16, 128, 128
HIDDEN = HEADS * HEAD_WIDTH

# The size of an attribute, by name; only attributes that a config has are set.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "num_decoder_layers",
            "encoder_layers",
            "num_encoder_layers",
            "num_blocks",
        ),
        LAYERS,
    ),
    **dict.fromkeys(("depth", "num_global_layers"), 2),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "emb_dim",
            "embedding_size",
            "word_embed_proj_dim",
            "lru_width",
            "attention_hidden_size",
            "out_hidden_size",
            "embedding_dim",
            "input_embedding_size",
            "adapter_in_dim",
            "adapter_out_dim",
            "adapter_input_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "attention_heads",
            "swa_num_attention_heads",
            "index_n_heads",
            "linear_num_heads",
            "linear_num_value_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_kv_heads",
            "kv_n_heads",
            "swa_num_key_value_heads",
            "linear_num_key_heads",
            "num_query_groups",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "v_head_dim",
            "dim_head",
            "d_head",
            "attention_head_size",
            "swa_head_dim",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "index_head_dim",
            "kv_channels",
            "qk_nope_head_dim",
        ),
        HEAD_WIDTH,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "moe_intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "ffn_hidden_size",
            "dff",
            "dim_ff",
            "d_inner",
            "n_inner",
            "feed_forward_size",
            "expert_ffn_hidden_size",
            "dense_intermediate_size",
            "intermediate_size_mlp",
            "moe_shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "mlp_dim",
        ),
        96,
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_head_dim": HEAD_WIDTH + 8,
    "index_topk": 8,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 8),
    "attention_chunk_size": 8,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    "hidden_size_per_layer_input": 8,
    "num_nextn_predict_layers": 0,
    **dict.fromkeys(("image_size", "crop_size"), 28),
    "type_vocab_size": 2,
}

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SMALL_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}

# What a type needs beyond the rules; `default` goes to the constructor of the default config.
_SWA = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": HEAD_WIDTH + 8,
    "swa_qk_nope_head_dim": HEAD_WIDTH,
    "swa_v_head_dim": HEAD_WIDTH,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": LAYERS},  # by default fewer than decoder layers, and the cache counts these
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "blt": {
        "num_hidden_layers": LAYERS,  # the cache of `generate` asks the outer config
        "encoder_config": {"hidden_size_global": HIDDEN},
        "decoder_config": {"hidden_size_global": HIDDEN},
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 2}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "dots3_note": {"text_config": _SWA},
    "dots3_note_text": _SWA,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_WIDTH},
    "hunyuan_v1_moe": {"head_dim": HEAD_WIDTH},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 2 * HEAD_WIDTH, "n_groups": 1},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "ministral": {"head_dim": HEAD_WIDTH},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": _SMALL_INDEXER,
    "qwen4_exp": {"text_config": _SMALL_INDEXER},
    "roc_bert": {"shape_vocab_size": 32, "pronunciation_vocab_size": 32},
    "phi4_multimodal": {
        "audio_config": {"ext_pw_out_channel": 32, "nemo_conv_channels": 32, "depthwise_separable_out_channel": 32}
    },
    "reformer": {"axial_pos_embds_dim": [16, HIDDEN - 16], "axial_pos_shape": [8, 16]},
    "xlstm": {"hidden_size": 2 * HIDDEN, "embedding_dim": 2 * HIDDEN},  # its widths round up to 64
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_WIDTH,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_WIDTH,
    },
    "xmod": {"default_language": "en_XX"},
}

NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower comes from timm, which is not installed; its text model is gemma3n_text",
    "gemma4_assistant": "drafts for another model, whose keys and values its forward needs",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values its forward needs",
}

TYPES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NOT_BUILT)


def tiny_config(model_type: str) -> Any:
    """A small config of a model type."""
    overrides = copy.deepcopy(OVERRIDES.get(model_type, {}))
    config_class = CONFIG_MAPPING[model_type]
    default = config_class(**overrides.pop("default", {})).to_dict()
    sizes = small(default)
    merge(sizes, overrides)
    drop = sizes.pop("drop", ())
    config = config_class(**{name: value for name, value in sizes.items() if name not in drop})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def small(default: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a config that its small form sets."""
    sizes = {name: _size(name, default[name]) for name in default if name in SIZES}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    sizes |= _attention_widths(default)
    sizes |= _token_ids(default)
    sizes |= _thinned_lists(default)
    for name, value in default.items():
        if name == "per_layer_config":
            continue  # derived again from the small sizes
        if isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
            sizes[name] = small(value) | {k: value[k] for k in ("model_type",) if k in value}
    return sizes


def _size(name: str, default: Any) -> Any:
    """The small size, in the shape of the default; a default of 0 or None switches something off and stays."""
    if isinstance(default, bool) or default is None or default == 0:
        return None
    if isinstance(default, list):
        return [SIZES[name]] * LAYERS
    return min(SIZES[name], default) if isinstance(default, int) else None


def _attention_widths(default: dict[str, Any]) -> dict[str, int]:
    """Heads keep their relations: as many KV heads as heads where the default says so, a rotary head of latents."""
    widths = {}
    heads = default.get("num_attention_heads")
    if heads and default.get("num_key_value_heads", 0) == heads:
        widths["num_key_value_heads"] = HEADS
    rotary = default.get("qk_rope_head_dim")
    if rotary and default.get("head_dim") == rotary:
        widths["head_dim"] = SIZES["qk_rope_head_dim"]
    return widths


def _token_ids(default: dict[str, Any]) -> dict[str, Any]:
    """Special tokens inside the vocabulary; no end, so that every generate runs to its length."""
    ids: dict[str, Any] = {}
    for number, name in enumerate(sorted(default)):
        if name in ("bos_token_id", "decoder_start_token_id"):
            ids[name] = 1
        elif name == "eos_token_id":
            ids[name] = None
        elif name == "pad_token_id":
            ids[name] = 0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default[name], int):
            ids[name] = VOCABULARY - 1 - number % 32
    return ids


def _thinned_lists(default: dict[str, Any]) -> dict[str, list[Any]]:
    """Lists with one word a layer, thinned together to LAYERS entries with every kind among them."""
    depth = next((default[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if default.get(n)), None)
    lists = {
        name: value
        for name, value in default.items()
        if isinstance(value, list) and len(value) == depth and all(isinstance(item, str | float) for item in value)
    }
    if not lists or depth <= LAYERS:
        return lists
    rows = list(zip(*lists.values(), strict=True))
    first = sorted({row: position for position, row in reversed(list(enumerate(rows)))}.values())
    kept = sorted((first + [position for position in range(depth) if position not in first])[:LAYERS])
    return {name: [value[position] for position in kept] for name, value in lists.items()}


def merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    """Lay changes over nested dictionaries."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        else:
            into[name] = value


def tiny_model(model_type: str, **settings: Any) -> Any:
    """A tiny random model of a type, the same at every call; `settings` go to `_from_config`."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model_class(config)._from_config(_own_config(config), **settings).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.decoder_start_token_id = 1
    model.generation_config.num_return_sequences = 1
    return model


def _model_class(config: Any) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _own_config(config: Any) -> Any:
    """The part of a composite config that the causal model takes, as AutoModelForCausalLM chooses it."""
    if _model_class(config).config_class is type(config):
        return config
    decoder = getattr(config, "decoder", None)
    return decoder if decoder is not None else config.get_text_config(decoder=True)


def prompt(model: Any) -> torch.Tensor:
    """Twelve prompt tokens, none of them special; one row a codebook where a model has several."""
    rows = getattr(model, "num_codebooks", 1)
    return torch.arange(3, 15).repeat(rows, 1)


def special_layers(model_type: str) -> list[int]:
    """The numbers of the layers that a step runs: those of the config, unless `LAYERS_RUN` knows better."""
    return LAYERS_RUN.get(model_type, list(range(LAYERS)))


# Layers that a step runs, where it is not each of LAYERS once.
LAYERS_RUN: dict[str, list[int]] = {
    "bloom": [0, 1],  # its config is tiny by itself
    "blt": list(range(9)),  # one of the byte encoder, four of the patches, four of the byte decoder
    "dory": list(range(6)),  # one, twice two in a loop, one
    "hrm_text": list(range(32)),  # twice: three times the four of one stack, then the four of the other
    "mllama": [0, 2, 3],  # layer 1 looks at an image; there is none
}

# Types that end without a norm between the last layer and the head: each layer ends in one, or none does.
NO_FINAL_NORM = frozenset(
    (
        "bart",
        "bert-generation",
        "blenderbot-small",
        "git",
        "marian",
        "mvp",
        "openai-gpt",
        "plbart",
        "prophetnet",
        "trocr",
        "xlnet",
    )
)

# Rows of the cache, where it is not one a layer.
CACHE_ROWS: dict[str, int] = {
    "bloom": 2,
    "blt": 8,  # four slots for bytes (one is filled) and four for the byte decoder
    "dory": 6,
    "hrm_text": 32,
    "longcat_flash": 8,  # two attentions a layer
    "mpt": 0,  # by default it generates without a cache
    "rwkv": 5,  # five states, each of all layers
}

# Types that are handed a cache and do not fill it.
EMPTY_CACHE = frozenset(("openai-gpt",))

# Steps that have no count, and why.
NOT_COUNTED: dict[str, tuple[tuple[int, ...], str]] = {
    "longcat_flash": ((0, 1, 2, 3), "experts that do nothing are chosen by the tokens"),
    "reformer": ((1, 2, 3), "its cache does not say how many positions it holds"),
    "xlnet": ((1, 2, 3), "its memory does not say how many positions it holds"),
}

# Types whose attention maps cannot be compared with the pairs that are counted, and why.
NO_MAPS: dict[str, str] = {
    "blt": "its maps are of some of its attentions",
    "cpmant": "its mask is filled after the softmax, so all pairs count",
    "deepseek_v4": "its compressed keys count as none, with the window's",
    "minimax": "its linear layers give maps too",
    "moshi": "its config has a window that its eager mask ignores",
    "reformer": "no softmax: all pairs of its chunks count",
    "rwkv": "no attention",
    "xlm": "it sees positions behind its own",
    "xlnet": "generation masks it, a plain call does not",
}
