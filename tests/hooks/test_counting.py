"""Counts of single operators and tiny modules; every number is derived by hand beside it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig

from lifetrace.hooks.attach import on_calls
from lifetrace.hooks.counting import CallCount, CallTree, CountingMode, causal_pairs, storage_id
from lifetrace.hooks.replay import reach


def count(run, *inputs, weights=(), visible=lambda stack, q_len, keys: q_len * keys):
    """The call that holds the products of `run(*inputs)`."""
    root = CallCount("", 0)
    sizes = {storage_id(weight): weight.nbytes for weight in weights}
    with torch.no_grad(), CountingMode(root, sizes, visible):
        run(*inputs)
    return root


def flops(root):
    return sum(product.flops for product in root.products()), sum(p.flops_dense for p in root.products())


def test_linear():
    layer = nn.Linear(8, 16)
    root = count(layer, torch.zeros(3, 8), weights=layer.parameters())
    (product,) = root.own
    assert (product.m, product.n, product.k, product.batch) == (3, 16, 8, 1)
    assert product.flops_dense == 2 * 3 * 16 * 8
    assert product.operand_bytes == (3 * 8 + 8 * 16 + 3 * 16) * 4
    assert sorted(root.weights_inside().values()) == [16 * 4, 8 * 16 * 4]  # bias, matrix


def test_a_batch_of_products():
    root = count(torch.matmul, torch.zeros(5, 2, 3), torch.zeros(5, 3, 7))
    assert flops(root) == (2 * 5 * 2 * 3 * 7,) * 2


def test_matrix_times_vector_and_dot():
    assert flops(count(torch.mv, torch.zeros(4, 6), torch.zeros(6)))[1] == 2 * 4 * 6
    assert flops(count(torch.dot, torch.zeros(6), torch.zeros(6)))[1] == 2 * 6


def test_depthwise_convolution():
    """Each of 6 channels is convolved alone: kernel 4 for each of 9 output positions."""
    layer = nn.Conv1d(6, 6, 4, groups=6)
    assert flops(count(layer, torch.zeros(1, 6, 12)))[1] == 2 * 6 * 9 * 4


def test_convolution_over_all_channels():
    layer = nn.Conv1d(3, 5, 2)
    assert flops(count(layer, torch.zeros(1, 3, 8)))[1] == 2 * (5 * 7) * (3 * 2)


def test_norms_and_activations_hold_no_product():
    root = count(nn.Sequential(nn.LayerNorm(8), nn.SiLU(), nn.Softmax(-1)), torch.zeros(3, 8))
    assert root.own == []
    assert root.unknown_inside() == set()


def test_an_operator_without_formula_is_unknown():
    root = count(torch.fft.fft, torch.zeros(8))
    assert root.unknown_inside() == {"aten._fft_r2c"}


def test_an_embedding_reads_the_gathered_rows():
    table = nn.Embedding(100, 8)
    root = count(table, torch.zeros(1, 3, dtype=torch.long), weights=[table.weight])
    assert list(root.weights_inside().values()) == [3 * 8 * 4]


def test_the_rows_of_chosen_experts_are_unknown_for_more_than_one_token():
    experts = nn.Parameter(torch.zeros(8, 4, 4))
    root = count(lambda chosen: experts[chosen], torch.tensor([1, 1]), weights=[experts])
    assert list(root.weights_inside().values()) == [None]


HEADS, Q, KEYS, WIDTH = 2, 3, 5, 4
SCORES = 2 * HEADS * Q * KEYS * WIDTH  # of all pairs; the weighted sum is as much
PAIRS = causal_pairs(Q, KEYS - Q)  # 3 + 4 + 5 of 15


def eager(query, key, value):
    scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
    return F.softmax(scores + torch.zeros(Q, KEYS), dim=-1) @ value


def heads(length, device="meta"):
    return torch.zeros(HEADS, length, WIDTH, device=device)


def on_meta(query, key, value):
    scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
    return F.softmax(scores, dim=-1) @ value


def causal(stack, q_len, keys):
    return causal_pairs(q_len, keys - q_len)


def test_attention_counts_the_pairs_that_are_let_through():
    root = count(on_meta, heads(Q), heads(KEYS), heads(KEYS), visible=causal)
    assert PAIRS == 12
    assert [product.attention for product in root.own] == [True, True]
    assert flops(root) == (2 * SCORES * 12 // 15, 2 * SCORES)


def test_masked_scores_that_hold_values_tell_the_pairs_themselves():
    mask = torch.full((Q, KEYS), torch.finfo(torch.float32).min).triu(KEYS - Q + 1)

    def masked(query, key, value):
        return F.softmax(query @ key.transpose(1, 2) + mask, dim=-1) @ value

    everything = count(eager, heads(Q, "cpu"), heads(KEYS, "cpu"), heads(KEYS, "cpu"), visible=causal)
    assert flops(everything) == (2 * SCORES, 2 * SCORES)  # its mask hides nothing, whatever was reasoned
    root = count(masked, heads(Q, "cpu"), heads(KEYS, "cpu"), heads(KEYS, "cpu"))
    assert flops(root) == (2 * SCORES * 12 // 15, 2 * SCORES)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_attention_counts_once_and_the_same(device):
    query, key, value = (heads(length, device)[None] for length in (Q, KEYS, KEYS))
    mask = torch.zeros(Q, KEYS, device=device)
    root = count(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask), visible=causal)
    assert flops(root)[1] == 2 * SCORES
    assert flops(root)[0] == 2 * SCORES * 12 // 15
    assert root.unknown_inside() == set()


def test_a_product_with_a_weight_is_no_attention():
    weight = nn.Parameter(torch.zeros(8, 8))
    root = count(lambda x: F.softmax(x @ weight, dim=-1), torch.zeros(3, 8), weights=[weight])
    assert [product.attention for product in root.own] == [False]


def test_causal_pairs():
    assert causal_pairs(4, 0) == 1 + 2 + 3 + 4
    assert causal_pairs(1, 9) == 10
    assert causal_pairs(3, 2) == 3 + 4 + 5


def test_causal_pairs_in_a_window():
    assert causal_pairs(6, 0, window=4) == 1 + 2 + 3 + 4 + 4 + 4
    assert causal_pairs(1, 99, window=4) == 4


def test_causal_pairs_in_chunks():
    assert causal_pairs(6, 0, chunk=4) == 1 + 2 + 3 + 4 + 1 + 2
    assert causal_pairs(2, 3, chunk=4) == 4 + 1


def attention(index, **attributes):
    module = nn.Module()
    module.layer_idx = index
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_what_limits_a_layer_is_what_its_config_says():
    config = LlamaConfig(num_hidden_layers=3)
    assert reach(attention(0), config) == (None, None)
    config.sliding_window, config.attention_chunk_size = 8, 16
    assert reach(attention(0), config) == (8, None)
    config.layer_types = ["sliding_attention", "full_attention", "chunked_attention"]
    assert [reach(attention(index), config) for index in range(3)] == [(8, None), (None, None), (None, 16)]
    assert reach(attention(1, sliding_window=4), config) == (None, None)
    assert reach(attention(0, sliding_window=4), config) == (4, None)
    config.use_sliding_window = False
    assert reach(attention(0), config) == (None, None)


def test_an_indexer_chooses_so_many_keys():
    config = LlamaConfig(num_hidden_layers=1)
    config.index_topk = 6
    assert reach(attention(0, indexer=None), config) == (6, None)


def test_an_outer_product_that_builds_a_table_is_no_matrix_product():
    class Angles(nn.Module):
        def forward(self, positions):
            return torch.ones(1, 8, 1) @ positions

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.angles = Angles()
            self.linear = nn.Linear(1, 4, bias=False)

        def forward(self, positions):
            return self.linear(self.angles(positions).transpose(1, 2)[..., :1])

    model = Model()
    root = CallCount("", 0)
    weights = {storage_id(p): p.nbytes for p in model.parameters()}
    mode = CountingMode(root, weights, lambda *_: 0, frozenset({"angles"}))
    tree = CallTree({module: name for name, module in model.named_modules()}, mode)
    with torch.no_grad(), on_calls(model, tree.enter, tree.leave), mode:
        model(torch.arange(12.0).reshape(1, 1, 12))
    # only the matrix of 4 x 1 over 12 positions counts, though it sums over one dimension too
    assert sum(product.flops_dense for product in root.products()) == 2 * 12 * 4


def test_a_product_that_comes_to_no_softmax_is_a_result_like_any_other():
    """Experts multiply by a copy of the chosen rows of their weight, which is no weight of the model."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8, 6))

        def forward(self, given):
            return (given @ self.weight[torch.tensor([1, 3])]) * 2

    model = nn.Sequential(Experts())
    root = CallCount("", 0)
    mode = CountingMode(root, {storage_id(p): p.nbytes for p in model.parameters()}, lambda *_: 0)
    tree = CallTree({module: name for name, module in model.named_modules()}, mode)
    with torch.no_grad(), on_calls(model, tree.enter, tree.leave), mode:
        model(torch.ones(2, 1, 8))
    (experts,) = root.inner
    assert (experts.output_shape, experts.dtype, experts.output_bytes) == ((2, 1, 6), "float32", 2 * 6 * 4)
