"""The plan's formulas, each by arithmetic."""

import pytest

from lifetrace.analysis import memory_plan as memory
from lifetrace.analysis import time_plan as timing
from lifetrace.analysis.ceilings import from_datasheet
from lifetrace.analysis.memory_plan import FORMATS, CacheGroup, Footprint, Matrices, Moment, Sizes
from lifetrace.analysis.time_plan import Packing, StepWork

LLAMA_2_7B = 6_738_415_616
# Per layer of Llama-2-7B: four 4096 × 4096 and three of 4096 and 11008.
MATRICES = (Matrices(128, 4096, 4096), Matrices(64, 11008, 4096), Matrices(32, 4096, 11008))


def full(layers, heads, width, item=2, capacity=None):
    shape = (1, heads, 0, width)
    return CacheGroup("full", layers, (shape, shape), 2 * heads * width, 0, heads, capacity, item)


def test_unquantized_weights():
    assert memory.weight_bytes(LLAMA_2_7B, MATRICES, FORMATS["float16"]).value == 13_476_831_232
    assert memory.weight_bytes(LLAMA_2_7B, MATRICES, FORMATS["float32"]).value == 26_953_662_464


def test_quantized_weights_have_scales_and_leave_the_rest():
    packed = 128 * 4096 * 4096 + 96 * 4096 * 11008
    rest = (LLAMA_2_7B - packed) * 2
    groups = packed // 128  # 4096 and 11008 divide by 128
    assert memory.weight_bytes(LLAMA_2_7B, MATRICES, FORMATS["int4"]).value == packed // 2 + groups * 2 + rest
    rows = 128 * 4096 + 64 * 11008 + 32 * 4096
    assert memory.weight_bytes(LLAMA_2_7B, MATRICES, FORMATS["int8"]).value == packed + rows * 4 + rest
    assert memory.weight_bytes(LLAMA_2_7B, MATRICES, FORMATS["float8"]).value == packed + 224 * 4 + rest


def test_a_last_group_of_fewer_inputs_has_a_scale_too():
    assert memory.weight_bytes(300, (Matrices(1, 3, 100),), FORMATS["int4"]).value == 150 + 3 * 2


@pytest.mark.parametrize(
    ("group", "token", "batch", "context", "whole"),
    [
        (full(32, 32, 128), 524_288, 1, 4096, 2 * 2**30),
        (full(32, 32, 128), 524_288, 16, 4096, 32 * 2**30),
        (full(80, 32, 128), 1_310_720, 1, 1000, 1_310_720_000),
        (full(80, 8, 128), 327_680, 1, 1, 327_680),
        (full(4, 2, 16, item=4), 1024, 1, 17, 17_408),
        (full(4, 2, 16, item=4, capacity=7), 1024, 2, 17, 2 * 7 * 1024),
    ],
)
def test_kv(group, token, batch, context, whole):
    assert memory.kv_bytes_per_token([group]).value == token
    assert memory.kv_bytes([group], batch, context).value == whole


def test_states_do_not_grow():
    state = CacheGroup("state", 64, (), 0, 5120 * 20, None, None, 2)
    assert memory.kv_bytes_per_token([state]).value == 0
    assert memory.kv_bytes([state], 3, 1).value == memory.kv_bytes([state], 3, 9000).value == 3 * 64 * 5120 * 20 * 2


def test_activations():
    assert memory.embedding_bytes(128_256, 4096, "float16").value == 1_050_673_152
    assert memory.hidden_state_bytes(1, 2048, 4096, "float16").value == 16_777_216
    assert memory.hidden_state_bytes(1, 32_768, 5120, "float16").value == 335_544_320
    assert memory.score_bytes(1, 32, 32_768, 32_768, "float16").value == 68_719_476_736
    assert memory.score_growth(2048, 131_072) == 4096
    assert memory.logit_bytes(2, 1000, "bfloat16", 2).value == 2 * 1000 * (2 + 8)


def test_training_is_16_bytes_a_parameter_in_parts():
    total, *parts = memory.training_bytes(LLAMA_2_7B)
    assert total.value == 107_814_649_856
    assert [part.value // LLAMA_2_7B for part in parts] == [2, 2, 4, 4, 4]
    assert sum(part.value for part in parts) == total.value


def test_formulas_hold_the_values():
    assert memory.kv_bytes_per_token([full(32, 32, 128)]).formula == "32 layers × 2 × 32 × 128 × 2 B"
    latent = CacheGroup("full", 27, ((1, 1, 0, 512), (1, 1, 0, 64)), 576, 0, 1, None, 2)
    assert memory.kv_bytes_per_token([latent]).formula == "27 layers × (1 × 512 + 1 × 64) × 2 B"
    assert memory.kv_bytes_per_token([latent]).value == 31_104


SIZES = Sizes(split_share=0.9, heads=40, kv_groups=(full(64, 8, 128),), layers=64, layer_share=0.9, ends_share=0.05)


def test_tensor_parallel_splits_matrices_and_heads_and_repeats_the_rest():
    divided = memory.split(SIZES, 4)
    assert divided.kind == "tensor"
    assert divided.weight_share == pytest.approx(0.9 / 4 + 0.1)
    assert divided.kv_share == pytest.approx(2 / 8)
    moment = Moment("m", kv=800, transient=100, logits=7, replicated_transient=20)
    assert divided.bytes_on_one(1000, moment) == 325 + 200 + (20 + 80 // 4) + 7


def test_more_devices_than_kv_heads_repeat_them():
    assert memory.split(SIZES, 20).kv_share == pytest.approx(1 / 8)


def test_heads_that_do_not_divide_are_split_by_layers():
    divided = memory.split(SIZES, 3)
    assert divided.kind == "layers"
    assert "40 heads do not divide by 3" in divided.words
    assert divided.weight_share == pytest.approx(0.9 * 22 / 64 + 0.05)
    assert divided.kv_share == pytest.approx(22 / 64)


def test_dividing():
    assert memory.dividing(40, 20) == [1, 2, 4, 5, 8, 10, 20]
    assert memory.dividing(None) == [1]


@pytest.mark.parametrize("need", [lambda n: 7 * n + 3, lambda n: n * n, lambda n: max(1000, 2 * n), lambda n: 2**n])
@pytest.mark.parametrize("limit", [10, 100, 1001, 9999])
def test_largest(need, limit):
    most = 60
    expected = max((n for n in range(1, most + 1) if need(n) <= limit), default=None)
    assert memory.largest(need, limit, most) == expected


def test_largest_takes_few_tries_where_the_need_is_straight():
    asked = []

    def need(count):
        asked.append(count)
        return 1000 + 17 * count

    assert memory.largest(need, 1000 + 17 * 31_415, 2**20) == 31_415
    assert len(asked) <= 6


def test_the_peak_is_the_highest_moment():
    footprint = Footprint((Moment("a", 1, 10, 0), Moment("b", 8, 0, 4)))
    peak = memory.peak_bytes(100, footprint)
    assert peak.value == 112
    assert peak.formula == "100 B weights + 8 B KV + 0 B transient + 4 B logits, in b"


def test_prediction_rows():
    rows = memory.predictions([memory.hidden_state_bytes(1, 10, 10, "float16")], {"hidden_state": 210})
    assert (rows[0].residual, rows[0].residual_share) == (10, 0.05)
    missing = memory.predictions([memory.hidden_state_bytes(1, 10, 10, "float16")], {})
    assert (missing[0].measured, missing[0].residual, missing[0].residual_share) == (None, None, None)


def test_experts():
    assert timing.distinct_experts(8, 2, 1) == 2
    assert timing.distinct_experts(8, 2, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert timing.distinct_experts(0, 0, 5) == 0


def work(flops=1_000, weights=100, kv=40, tokens=1):
    return StepWork(tokens, flops, flops, 0, weights, 10, kv, 0)


def test_floor_is_the_larger_of_compute_and_memory():
    sheet = from_datasheet("H100 SXM")  # 989 TFLOP/s, 3350 GB/s
    floor = timing.step_floor(
        "decode", work(989_000, 3_350, 0), 5, Packing(), sheet, FORMATS["float16"], parallel=1, working_set_bytes=1
    )
    assert floor.compute_ns == pytest.approx(1.0)
    assert floor.memory_ns == pytest.approx((3_350 + 10) / 3350)
    assert (floor.bound, floor.close_to) == ("memory", "compute")
    halved = timing.step_floor(
        "decode", work(989_000, 3_350, 0), 5, Packing(), sheet, FORMATS["float16"], parallel=2, working_set_bytes=1
    )
    assert halved.floor_ns == pytest.approx(floor.floor_ns / 2)


def test_without_a_device_there_is_no_time():
    floor = timing.step_floor("decode", work(), 5, Packing(), None, FORMATS["int4"], 1, 1)
    assert (floor.floor_ns, floor.bound, floor.bytes_) == (None, "unknown", 150)


def test_packing_saves_bytes():
    assert timing.moved_bytes(work(), Packing(saved_bytes=30, kv_share=0.5)) == 100 - 30 + 20 + 10


def test_a_device_without_the_type_multiplies_in_another():
    assert timing.multiplied_dtype(from_datasheet("A10"), FORMATS["float8"]) == "bfloat16"
    assert timing.multiplied_dtype(from_datasheet("T4"), FORMATS["float8"]) == "float16"
    assert timing.multiplied_dtype(from_datasheet("L4"), FORMATS["float8"]) == "float8_e4m3fn"


def test_crossovers_by_hand():
    sheet = from_datasheet("H100 SXM")
    # One sequence: 1000 FLOPs and no bytes of its own but 10 of activations; weights of 10**6 bytes.
    decode = StepWork(1, 1_000_000, 1_000_000, 0, 1_000_000, 0, 0, 0)
    prefill = StepWork(16, 16_000_000, 16_000_000, 0, 1_000_000, 0, 0, 0)
    found = timing.crossovers(decode, decode, prefill, 1, Packing(), sheet, FORMATS["float16"], 50)
    ridge = 989e12 / 3350e9  # FLOP a byte: n tokens do n FLOP a byte of weights
    assert found.decode_batch == found.prefill_length == int(ridge) + 1
    assert found.kv_context == 20_000
