"""Model R: every number is derived here by hand, from its sizes.

hidden 64, MLP 128, 4 layers, 4 heads of 16 on 2 KV heads, vocabulary 256, float32, 12 prompt
tokens, 6 new ones, greedy.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import lifetrace
from lifetrace.analysis import judge
from reference_model import R_SIZES, ROTARY_TABLE_OPS

LAYERS, HIDDEN, MLP, VOCABULARY, KV_WIDTH = 4, 64, 128, 256, 32
PROJECTIONS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_WIDTH  # q, o; k, v
MATRICES = PROJECTIONS + 3 * HIDDEN * MLP
HEAD_FLOPS = 2 * HIDDEN * VOCABULARY  # 32,768


def attention_flops(pairs: int) -> int:
    """Scores and weighted sum: two products of 16 multiply–adds for each pair and each of 4 heads."""
    return 2 * 2 * 4 * 16 * pairs


def forward_flops(q_len: int, pairs: int) -> int:
    return LAYERS * (2 * q_len * MATRICES + attention_flops(pairs)) + HEAD_FLOPS


@pytest.fixture
def trace_r(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "r", detail="module") as trace:
        model_r.generate(prompt_12, max_new_tokens=6, do_sample=False)
    return trace


def test_parameters(trace_r):
    norms = (2 * LAYERS + 1) * HIDDEN
    expected = 2 * VOCABULARY * HIDDEN + LAYERS * MATRICES + norms
    assert expected == 180_800
    assert trace_r.meta["model"]["parameters"] == expected
    assert trace_r.modules.parameters.sum() == expected


def test_tied_embedding_counts_once(prompt_12, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES, tie_word_embeddings=True)).eval()
    with lifetrace.trace(model, out=tmp_path / "tied") as trace:
        model.generate(prompt_12, max_new_tokens=2)
    assert trace.meta["model"]["parameters"] == 180_800 - VOCABULARY * HIDDEN == 164_416
    head = trace.modules.set_index("module").loc["lm_head"]
    assert head.tied_to == "model.embed_tokens"
    assert (trace.steps.flops_dense == [3_719_168, 340_992]).all()


def test_steps(trace_r):
    steps = trace_r.steps
    assert steps.step.tolist() == [0, 1, 2, 3, 4, 5]
    assert steps.phase.tolist() == ["prefill"] + ["decode"] * 5
    assert steps.q_len.tolist() == [12, 1, 1, 1, 1, 1]
    assert steps.kv_len_before.tolist() == [0, 12, 13, 14, 15, 16]
    assert steps.kv_len_after.tolist() == [12, 13, 14, 15, 16, 17]
    assert steps.token_count.tolist() == [1] * 6
    assert steps.tokens_real.tolist() == [12, 1, 1, 1, 1, 1]


def test_kv_cache(trace_r):
    a_position = LAYERS * 2 * KV_WIDTH * 4  # keys and values, float32
    assert trace_r.steps.kv_bytes.tolist() == [n * a_position for n in range(12, 18)]
    assert trace_r.steps.kv_bytes.iloc[-1] == 17_408
    assert trace_r.steps.kv_write_bytes.tolist() == [12 * a_position] + [a_position] * 5
    assert trace_r.steps.kv_read_bytes.tolist() == [0] + [n * a_position for n in range(12, 17)]
    # torch.cat reads and writes all that is held at each append
    assert trace_r.steps.kv_copy_bytes.tolist() == [0] + [2 * n * a_position for n in range(12, 17)]
    assert set(trace_r.kv.kind) == {"full"}
    assert trace_r.kv.groupby("step").logical_bytes.sum().tolist() == trace_r.steps.kv_bytes.tolist()


NORM, ROTARY, CACHE, ACT = 6, 2 * 5, 2, 2  # pow, mean, add, rsqrt, two products; neg, cat, products, sum; cat
ATTENTION_OPS = 4 + ROTARY + CACHE + 1
MLP_OPS = 3 + ACT
LAYER_OPS = 2 * NORM + ATTENTION_OPS + MLP_OPS + 2  # two residual adds
AROUND_OPS = 1 + ROTARY_TABLE_OPS + NORM + 1 + 2  # embedding; rotary table; final norm; head; the position of the step


def test_operators(trace_r):
    assert trace_r.steps.op_count.tolist() == [LAYERS * LAYER_OPS + AROUND_OPS] * 6
    assert LAYERS * LAYER_OPS + AROUND_OPS == 161 + (ROTARY_TABLE_OPS - 7)
    spans = trace_r.spans[trace_r.spans.step == 3]
    layers = spans[spans.stage == "layer"]
    assert set(layers[layers.part.isna()].op_count) == {LAYER_OPS} == {36}
    assert set(layers[layers.part == "norm"].op_count) == {NORM}
    assert set(layers[layers.part == "attention"].op_count) == {ATTENTION_OPS}
    assert set(layers[layers.part == "attention_core"].op_count) == {ROTARY + CACHE + 1}
    assert set(layers[layers.part == "mlp"].op_count) == {MLP_OPS}
    assert spans[spans.stage == "sample"].op_count.isna().all()  # counted in the forward alone


def test_counting_operators_calls_no_hook_but_ours(model_r, prompt_12, tmp_path):
    seen = []
    model_r.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    with lifetrace.trace(model_r, out=tmp_path / "hooked") as trace:
        model_r.generate(prompt_12, max_new_tokens=3)
    assert trace.steps.op_count.notna().all()
    assert len(seen) == 3
    model_r.generate(prompt_12, max_new_tokens=2)
    assert len(seen) == 5


def test_eager_attention_launches_more(prompt_12, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES, attn_implementation="eager")).eval()
    with lifetrace.trace(model, out=tmp_path / "eager") as trace:
        model.generate(prompt_12, max_new_tokens=2)
    attention = trace.spans[(trace.spans.part == "attention") & (trace.spans.phase == "decode")]
    # keys and values copied for each query head: 2; scores, scaling, softmax, weighted sum, order of heads: 5
    assert set(attention.op_count) == {4 + ROTARY + CACHE + 2 + 5}


def test_many_small_layers_are_bound_by_launching(tmp_path):
    """30 layers of R's width: 1,097 operators of 1 µs, against 5.3 MB at 100 GB/s, 53 µs."""
    model = LlamaForCausalLM(LlamaConfig(**R_SIZES | {"num_hidden_layers": 30})).eval()
    with lifetrace.trace(model, out=tmp_path / "toy") as trace:
        model.generate(torch.arange(3, 15)[None], max_new_tokens=6)
    operators = 30 * LAYER_OPS + AROUND_OPS
    assert operators == 1_097 + (ROTARY_TABLE_OPS - 7)
    assert set(trace.steps.op_count) == {operators}
    for phase in judge(lifetrace.read_trace(tmp_path / "toy")).phases:
        assert phase.verdict.bound == "launch"
        assert phase.verdict.launch_ns == pytest.approx(1_000 * operators * phase.steps)
        assert phase.verdict.roof_ns < 0.2 * phase.verdict.launch_ns


def test_flops(trace_r):
    dense = [forward_flops(12, 12 * 12)] + [forward_flops(1, kv) for kv in range(13, 18)]
    assert dense[0] == 3_719_168
    assert dense[1] == 340_992
    assert sum(dense) == 5_434_368
    assert trace_r.steps.flops_dense.tolist() == dense
    causal_pairs = 12 * 13 // 2
    assert forward_flops(12, causal_pairs) == 3_651_584
    assert trace_r.steps.flops.tolist() == [3_651_584, *dense[1:]]
    assert trace_r.steps.flops_counted.tolist() == trace_r.steps.flops.tolist()


def test_flops_of_spans_add_up(trace_r):
    spans = trace_r.spans
    top = spans[spans.parent.isna()].groupby("step").flops.sum()
    assert top.tolist() == trace_r.steps.flops.tolist()
    head = spans[spans.stage == "lm_head"]
    assert head.flops.tolist() == [HEAD_FLOPS] * 6
    core = spans[(spans.part == "attention_core") & (spans.step == 0) & (spans.layer == 2)]
    assert core.flops_dense.tolist() == [attention_flops(144)]
    assert core.flops.tolist() == [attention_flops(78)]


def test_what_multiplies_nothing_is_a_true_zero(trace_r):
    spans = trace_r.spans
    loop = spans[spans.stage.isin(["prepare", "sample", "other"])]
    assert (loop.flops == 0).all()
    norms = spans[spans.part == "norm"]
    assert (norms.flops == 0).all()


def test_guidance_inside_sample_is_not_called_free(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "cfg") as trace:
        model_r.generate(prompt_12, max_new_tokens=2, guidance_scale=1.5, do_sample=False)
    assert trace.spans[(trace.spans.stage == "sample") & trace.spans.parent.isna()].flops.isna().all()
    guidance = trace.steps[trace.steps.role == "guidance"]
    assert guidance.flops.notna().all()


def test_what_has_no_formula_is_null_and_listed(model_r, prompt_12, tmp_path):
    @torch.library.custom_op("lifetrace_tests::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    mystery.register_fake(lambda x: torch.empty_like(x))

    class Mysterious(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return mystery(self.inner(x))

    model_r.model.layers[2].mlp = Mysterious(model_r.model.layers[2].mlp)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=2, do_sample=False)
    (entry,) = trace.meta["uncounted"]
    assert entry["module"] == "model.layers.2.mlp"
    assert entry["operators"] == ["lifetrace_tests.mystery"]
    assert 0 < entry["share_of_time"] < 1
    assert trace.steps.flops.isna().all()
    assert trace.steps.flops_counted.tolist() == [3_651_584, 340_992]
    layers = trace.spans[(trace.spans.stage == "layer") & (trace.spans.step == 1)]
    unknown = layers[layers.flops.isna()]
    assert set(zip(unknown.layer, unknown.part.fillna("whole"), strict=True)) == {(2, "whole"), (2, "mlp")}
    assert "1 module without a formula" in trace._repr_html_()


def test_products_hold_the_flops_of_their_signature(trace_r):
    products = trace_r.products
    prefill = products[products.signature == 0]
    assert prefill.flops.sum() == 3_719_168
    q = prefill[prefill.module == "model.layers.0.self_attn.q_proj"].iloc[0]
    assert (q.m, q.n, q.k, q.batch) == (12, 64, 64, 1)


def test_bytes_at_the_boundaries_of_stages(trace_r):
    prefill = trace_r.spans[trace_r.spans.step == 0].set_index("module")
    embed = prefill.loc["model.embed_tokens"]
    assert embed.input_bytes == 12 * 8  # ids are int64
    assert embed.output_bytes == 12 * HIDDEN * 4
    assert embed.weight_bytes == 12 * HIDDEN * 4  # only the gathered rows
    down = prefill.loc["model.layers.3.mlp.down_proj"]
    assert (down.input_bytes, down.output_bytes) == (12 * MLP * 4, 12 * HIDDEN * 4)
    assert down.weight_bytes == HIDDEN * MLP * 4
    assert list(down.input_shape) == [1, 12, MLP]
    assert list(down.output_shape) == [1, 12, HIDDEN]
    assert down["dtype"] == "float32"
    attention = prefill.loc["model.layers.0.self_attn"]
    assert attention.output_bytes == 12 * HIDDEN * 4  # no attention map, which only eager code returns
    head = prefill.loc["lm_head"]
    assert list(head.output_shape) == [1, 1, VOCABULARY]  # only the last position


def test_eager_attention_counts_the_same(prompt_12, tmp_path):
    model = LlamaForCausalLM._from_config(LlamaConfig(**R_SIZES), attn_implementation="eager").eval()
    with lifetrace.trace(model, out=tmp_path / "eager") as trace:
        model.generate(prompt_12, max_new_tokens=6, do_sample=False)
    assert trace.meta["model"]["attention"] == "eager"
    assert trace.steps.flops_dense.sum() == 5_434_368
    assert trace.steps.flops.iloc[0] == 3_651_584


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixture_of_experts_counts_the_active_ones(experts, prompt_12, tmp_path):
    config = MixtralConfig(**R_SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    model = MixtralForCausalLM._from_config(config, experts_implementation=experts).eval()
    with lifetrace.trace(model, out=tmp_path / "moe") as trace:
        model.generate(prompt_12, max_new_tokens=2, do_sample=False)
    router, two_experts = HIDDEN * 8, 2 * 3 * HIDDEN * MLP
    per_layer = 2 * 12 * (PROJECTIONS + router + two_experts) + attention_flops(144)
    assert LAYERS * per_layer + HEAD_FLOPS == 6_127_616
    assert trace.steps.flops_dense.iloc[0] == 6_127_616


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("batch", [1, 2])
def test_weight_bytes_are_those_of_the_distinct_experts_used(experts, batch, prompt_12, tmp_path):
    config = MixtralConfig(**R_SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    torch.manual_seed(0)
    model = MixtralForCausalLM._from_config(config, experts_implementation=experts).eval()
    used = []
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: used.append(args[1].unique().numel()))
        for layer in model.model.layers
    ]
    with lifetrace.trace(model, out=tmp_path / "moe") as trace:
        model.generate(torch.cat([prompt_12] * batch) + torch.arange(batch)[:, None], max_new_tokens=2, do_sample=False)
    for handle in handles:
        handle.remove()
    an_expert, router, norms = 3 * HIDDEN * MLP * 4, HIDDEN * 8 * 4, 2 * HIDDEN * 4
    for step, tokens in enumerate((12 * batch, batch)):
        distinct = used[LAYERS * step : LAYERS * (step + 1)]
        layers = [PROJECTIONS * 4 + router + norms + count * an_expert for count in distinct]
        spans = trace.spans[(trace.spans.step == step) & (trace.spans.stage == "layer")]
        assert spans[spans.part.isna()].weight_bytes.tolist() == layers
        assert spans[spans.part == "mlp"].weight_bytes.tolist() == [router + count * an_expert for count in distinct]
        around = tokens * HIDDEN * 4 + HIDDEN * 4 + VOCABULARY * HIDDEN * 4  # rows, final norm, head
        assert trace.steps.weight_bytes.iloc[step] == sum(layers) + around


def test_a_sliding_window_limits_the_pairs(prompt_12, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**R_SIZES, sliding_window=4)).eval()
    with lifetrace.trace(model, out=tmp_path / "window") as trace:
        model.generate(prompt_12, max_new_tokens=2, do_sample=False)
    pairs = 1 + 2 + 3 + 9 * 4  # a position sees itself and three before it
    assert trace.steps.flops.iloc[0] == forward_flops(12, pairs)
    assert trace.steps.flops.iloc[1] == forward_flops(1, 4)


def test_beams_multiply_the_batch(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "beams") as trace:
        model_r.generate(prompt_12, max_new_tokens=6, num_beams=3, do_sample=False)
    assert trace.steps.batch.tolist() == [3] * 6
    assert trace.steps.kv_bytes.iloc[-1] == 3 * 17_408 == 52_224
    assert trace.steps.flops_dense.sum() == 3 * 5_434_368 == 16_303_104


def test_chunked_prefill_is_three_prefill_steps(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "chunks") as trace:
        model_r.generate(prompt_12, max_new_tokens=6, prefill_chunk_size=5, do_sample=False)
    steps = trace.steps
    assert steps.phase.tolist() == ["prefill"] * 3 + ["decode"] * 5
    assert steps.q_len.tolist() == [5, 5, 2, 1, 1, 1, 1, 1]
    assert steps.token_count.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    third = steps.iloc[2]
    assert trace.meta["calls"][0]["first_token_ns"] == third.start_ns + third.wall_ns


def test_padding_is_processed_but_not_real(model_r, tmp_path):
    ids = torch.arange(3, 27).view(2, 12).clone()
    mask = torch.ones_like(ids)
    mask[0, :8] = 0  # a prompt of 4 tokens, padded on the left
    with lifetrace.trace(model_r, out=tmp_path / "padded") as trace:
        model_r.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    first = trace.steps.iloc[0]
    assert (first.tokens_processed, first.tokens_real) == (24, 16)
    assert trace.meta["calls"][0]["prompt_tokens"] == [4, 12]


def test_a_static_cache_is_read_in_full(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "static") as trace:
        model_r.generate(prompt_12, max_new_tokens=6, do_sample=False, cache_implementation="static")
    a_position = LAYERS * 2 * KV_WIDTH * 4
    capacity = 12 + 6 - 1
    assert trace.steps.kv_bytes.tolist() == [n * a_position for n in range(12, 18)]
    assert trace.steps.kv_allocated_bytes.tolist() == [capacity * a_position] * 6
    assert trace.steps.kv_read_bytes.tolist() == [capacity * a_position] * 6
    assert trace.steps.kv_copy_bytes.tolist() == [0] * 6
    assert trace.steps.flops_dense.tolist()[1:] == [forward_flops(1, capacity)] * 5
    assert trace.steps.flops.tolist() == [3_651_584] + [forward_flops(1, kv) for kv in range(13, 18)]


def test_without_a_cache_every_position_is_computed_again(model_r, prompt_12, tmp_path):
    with lifetrace.trace(model_r, out=tmp_path / "nocache") as trace:
        model_r.generate(prompt_12, max_new_tokens=3, do_sample=False, use_cache=False)
    assert trace.steps.q_len.tolist() == [12, 13, 14]
    assert trace.steps.phase.tolist() == ["prefill", "decode", "decode"]
    assert trace.steps.flops_dense.tolist() == [forward_flops(n, n * n) for n in (12, 13, 14)]
    again = sum(forward_flops(n, n * (n + 1) // 2) for n in (13, 14))
    cached = sum(forward_flops(1, n) for n in (13, 14))
    note = f"decode computed {again:,} FLOPs; with one it would be {cached:,}, {again / cached:.1f} times less"
    assert note in trace.meta["notes"][0]


def test_three_traces_give_the_same_numbers(model_r, prompt_12, tmp_path):
    counts = []
    for number in range(3):
        with lifetrace.trace(model_r, out=tmp_path / str(number)) as trace:
            model_r.generate(prompt_12, max_new_tokens=4, do_sample=False)
        columns = ["flops", "weight_bytes", "kv_read_bytes", "activation_bytes", "kv_bytes"]
        counts.append(trace.steps[columns].values.tolist())
    assert counts[0] == counts[1] == counts[2]
