"""Sizes of the reference model R, and what of its work depends on transformers' version."""

import inspect

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# Operators that make the rotary table: frequencies by positions, in older versions as a product of matrices.
ROTARY_TABLE_OPS = 11 if "inv_freq_expanded" in inspect.getsource(LlamaRotaryEmbedding.forward) else 7

R_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
