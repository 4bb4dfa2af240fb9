"""Parameters and bytes of what a model holds: ties, packed weights, shards, offloaded layers, quantized caches."""

from importlib import resources

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import lifetrace
from lifetrace.hooks.inventory import inventory, parameter_count
from lifetrace.hooks.stages import Lifecycle

NOWHERE = Lifecycle(None, (), None, {})


class Packed(nn.Module):
    """A matrix of 64 inputs and 16 outputs, eight 4-bit numbers in each int32, with scales by group of 32."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 64, 16
        self.register_buffer("qweight", torch.zeros(64 // 8, 16, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(2, 16, dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(16))


def test_a_packed_matrix_counts_what_it_stands_for():
    rows = inventory(nn.Sequential(Packed()), NOWHERE)
    assert parameter_count(rows) == 64 * 16 + 16
    assert rows[0].weight_bytes == 8 * 16 * 4 + 2 * 16 * 2 + 16 * 4


def test_a_tied_weight_counts_once_and_a_bias_of_its_own_still_counts():
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10)})
    model["head"].weight = model["embed"].weight
    rows = {row.module: row for row in inventory(model, NOWHERE)}
    assert parameter_count(list(rows.values())) == 10 * 4 + 10
    plain = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    plain["head"].weight = plain["embed"].weight
    assert [row.tied_to for row in inventory(plain, NOWHERE)] == [None, "embed"]


def test_a_sharded_weight_shows_the_bytes_of_its_shard():
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        layer = nn.Linear(8, 16, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        row = inventory(nn.Sequential(layer), NOWHERE)[0]
    finally:
        dist.destroy_process_group()
    assert row.parameters == 8 * 16
    assert row.weight_bytes == 8 * 16 * 4 // 2


def test_layers_on_disk_are_counted_and_called_offloaded(tmp_path):
    folder = str(resources.files("lifetrace.demo_model"))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i == 3 else "cpu" for i in range(6)}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "weights"
    )
    ids = torch.arange(3, 15)[None]
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(expected, generated)
    assert trace.meta["model"]["parameters"] == 2_755_008
    offloaded = trace.modules[trace.modules.offloaded]
    assert offloaded.module.str.startswith("model.layers.3.").all()
    assert offloaded.weight_bytes.sum() == 0
    assert trace.steps.flops.notna().all()
    assert sorted(trace.spans[trace.spans.stage == "layer"].layer.unique()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_cache_holds_a_quarter_of_the_bytes(model_r, prompt_12, tmp_path):
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "do_sample": False}
    try:
        expected = model_r.generate(prompt_12, max_new_tokens=4, **settings)
    except (ImportError, ValueError) as error:
        pytest.skip(f"this transformers has no cache in 8-bit floats: {error}")
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        generated = model_r.generate(prompt_12, max_new_tokens=4, **settings)
    assert torch.equal(expected, generated)
    assert trace.steps.kv_len_after.tolist() == [12, 13, 14, 15]
    a_position = 4 * 2 * 32  # layers, keys and values, 2 heads of 16, one byte each
    assert trace.steps.kv_bytes.tolist() == [n * a_position for n in (12, 13, 14, 15)]
    assert set(trace.kv["dtype"]) == {"float8_e4m3fn"}
