"""Weights that accelerate brings from the disk for each call: a part of their own, at every level of detail."""

import json

import accelerate
import pytest
import torch
from click.testing import CliRunner
from killing import model_r as make_r
from left_behind import left_behind
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace.analysis import judge
from lifetrace.analysis.breakdown import breakdown
from lifetrace.analysis.waits import Waits
from lifetrace.cli import main
from lifetrace.hooks.replay import meta_copy
from reference_model import R_SIZES

PROMPT = torch.arange(3, 15)[None]
# Of one layer: q, o (64 x 64), k, v (64 x 32), three of 64 x 128, two norms of 64, in float32.
LAYER_BYTES = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) * 4
OFFLOADED = (2, 3)


@pytest.fixture
def offloaded(tmp_path):
    """Model R, two of whose four layers lie on the disk."""
    make_r().save_pretrained(tmp_path / "model")
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    layers = {f"model.layers.{n}": "disk" if n in OFFLOADED else "cpu" for n in range(4)}
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=others | layers, offload_folder=tmp_path / "offloaded"
    ).eval()


@pytest.mark.parametrize(
    ("detail", "parts"),
    [
        ("layer", {"weights": 9}),
        ("block", {"norm.weights": 2, "attention.weights": 4, "mlp.weights": 3}),
        ("module", {"norm.weights": 2, "attention.weights": 4, "mlp.weights": 3}),
    ],
)
def test_bringing_weights_is_a_part_of_its_own(offloaded, tmp_path, detail, parts):
    expected = make_r().generate(PROMPT, max_new_tokens=3, do_sample=False)
    before = left_behind(offloaded)
    with lifetrace.trace(offloaded, out=tmp_path / "t", detail=detail) as trace:
        assert torch.equal(offloaded.generate(PROMPT, max_new_tokens=3, do_sample=False), expected)
    assert left_behind(offloaded) == before
    spans = trace.spans[trace.spans.part.fillna("").str.endswith("weights")]
    assert sorted(spans.layer.unique()) == list(OFFLOADED)
    one = spans[(spans.step == 1) & (spans.layer == 2)]
    assert one.part.value_counts().to_dict() == parts
    assert one.weight_bytes.sum() == LAYER_BYTES
    assert (spans.flops == 0).all()
    released = trace.spans[trace.spans.part.fillna("").str.endswith("release")]
    assert len(released) == len(spans)
    assert (released.weight_bytes == 0).all()
    assert (released.flops == 0).all()
    assert trace.steps.flops_dense.tolist() == [3_719_168, 340_992, 342_016]
    whole = {(row.phase, row.part): row for row in breakdown(trace) if row.stage == "layer"}
    inside = [row.time_ns for (phase, part), row in whole.items() if phase == "decode" and part is not None]
    assert sum(inside) == pytest.approx(whole["decode", None].time_ns)
    assert whole["decode", "weights"].time_ns == pytest.approx(spans[spans.phase == "decode"].host_ns.sum())
    assert min(inside) > 0


# older versions of transformers take the place of an offloaded embedding for that of the model
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
def test_a_shared_weight_that_is_offloaded_counts_once(tmp_path):
    """The head is the embedding: 180,800 parameters less 256 x 64. accelerate forgets that with the first call."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**R_SIZES | {"tie_word_embeddings": True})).save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "disk", "lm_head": "disk"}
    places |= dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    ).eval()
    model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    assert trace.meta["model"]["parameters"] == 180_800 - 256 * 64
    head = trace.modules.set_index("module").loc["lm_head"]
    assert (head.tied_to, head.parameters, head.offloaded) == ("model.embed_tokens", 256 * 64, True)


def test_a_model_that_is_brought_whole_waits_between_its_stages(tmp_path):
    """accelerate's hook brings the whole model before its first forward; it stays for the others."""
    model, _ = accelerate.cpu_offload_with_hook(make_r(), execution_device="cpu")
    with lifetrace.trace(model, out=tmp_path / "t") as trace:
        model.generate(PROMPT, max_new_tokens=3, do_sample=False)
    brought = trace.spans[trace.spans.part == "weights"]
    assert set(brought.stage) == {"other"}
    assert brought.parent.notna().all()
    assert set(brought.weight_bytes) == {180_800 * 4 + buffer_bytes(model)}
    tops = trace.spans[trace.spans.parent.isna() & trace.spans.step.notna()]
    assert tops.groupby("step").host_ns.sum().tolist() == trace.steps.wall_ns.tolist()
    for phase in judge(trace).phases:
        assert phase.waits.weights_ns == brought[brought.phase == phase.phase].host_ns.sum()


def buffer_bytes(model):
    return sum(buffer.nbytes for buffer in model.buffers())


def test_explain_leaves_products_with_what_computes_them(offloaded, tmp_path):
    with lifetrace.trace(offloaded, out=tmp_path / "t") as trace:
        offloaded.generate(PROMPT, max_new_tokens=2, do_sample=False)
    shown = CliRunner().invoke(main, ["explain", str(trace.path), "--layer", "2", "--step", "1", "--json"])
    pieces = json.loads(shown.stdout)["pieces"]
    brought = {piece["part"]: piece["bytes"] for piece in pieces if piece["part"] in ("norm.weights", "mlp.release")}
    assert brought == {"norm.weights": 64 * 4, "mlp.release": 0}
    assert {piece["part"]: len(piece["matmuls"]) for piece in pieces if piece["matmuls"]} == {"attention": 6, "mlp": 3}


def test_the_verdict_says_how_much_of_the_time_it_is(offloaded, tmp_path):
    with lifetrace.trace(offloaded, out=tmp_path / "t") as trace:
        offloaded.generate(PROMPT, max_new_tokens=3, do_sample=False)
    rows = {r.part: r for r in breakdown(trace) if (r.phase, r.stage) == ("decode", "layer")}
    row, release = rows["weights"], rows["release"]
    verdicts = judge(trace)
    decode = next(phase for phase in verdicts.phases if phase.phase == "decode")
    assert decode.waits == Waits(weights_ns=row.time_ns + release.time_ns, communication_ns=0)
    lost = next(loss for loss in verdicts.losses if (loss.phase, loss.part) == ("decode", "weights"))
    assert lost.lost_ns == lost.time_ns == row.time_ns
    assert lost.reason.startswith("100% of it because offloaded weights are brought")
    shown = " ".join(CliRunner().invoke(main, ["show", str(trace.path)]).stdout.split())
    assert f"Decode waits for offloaded weights in {row.share + release.share:.0%} of its time" in shown


def test_counting_copies_no_offloaded_weights(offloaded):
    class Kept(dict):
        def __deepcopy__(self, memo):
            raise AssertionError("the weights themselves are copied")

    loader = offloaded.model.layers[2].mlp.up_proj._hf_hook
    loader.weights_map = Kept(weight=loader.weights_map["weight"])
    assert {parameter.device.type for parameter in meta_copy(offloaded).parameters()} == {"meta"}


def test_a_copy_of_a_traced_model_marks_nothing(offloaded, tmp_path):
    import copy

    with lifetrace.trace(offloaded, out=tmp_path / "t") as trace:
        twin = copy.deepcopy(offloaded)
        twin.generate(PROMPT, max_new_tokens=2, do_sample=False)
    assert len(trace.steps) == 0
    assert type(twin.model.layers[2].mlp.up_proj._hf_hook).__name__ == "AlignDevicesHook"
