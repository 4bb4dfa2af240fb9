"""`lifetrace plan`: worked numbers as they are printed, the catalogue, what fits, and plan against reality."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lifetrace.cli import main
from lifetrace.errors import UsageError
from lifetrace.hooks import kvcache
from lifetrace.hooks.live_bytes import LiveBytes
from lifetrace.plan import Planner, against, plan
from lifetrace.plan_model import PlannedModel
from lifetrace.plan_subject import Dimensions, Request, parse_bytes
from lifetrace.workload import catalogue, config_from_catalogue
from reference_model import R_SIZES
from tiny_models import tiny_model


def printed(*arguments, columns=120):
    """What the command prints, without the line breaks that a table folds a cell with."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments):
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr


def row(output, name):
    """The cells of the first line that begins so."""
    line = next(line for line in output.splitlines() if line.startswith(name))
    return re.split(r"\s{2,}", line.strip())


@pytest.fixture
def reference_config(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"model_type": "llama", **R_SIZES}))
    return path


# -- worked numbers ----------------------------------------------------------------------------


def test_llama_3_1_8b():
    output = printed("llama-3.1-8b", "--dtype", "float16", "--prompt-length", 2048)
    assert row(output, "embedding, float16")[1] == "1,050,673,152"
    assert row(output, "hidden state [1, 2,048, 4,096]")[1] == "16,777,216"
    assert "2,048 to 131,072 tokens is × 4,096" in output


def test_eager_scores_that_flash_attention_never_writes():
    output = printed("llama-3.1-8b", "--dtype", "fp16", "--prompt-length", 32_768)
    assert row(output, "eager scores of one layer")[1:] == ["68,719,476,736", "68.7 GB", "64.0 GiB"]
    assert "fused attention never writes them" in output


def test_llama_2_7b():
    output = printed("llama-2-7b", "--dtype", "float16", "--context", 4096, "--batch", 16)
    assert row(output, "all")[1] == "6,738,415,616"
    assert row(output, "a block's matrices, attention")[-1] == "33.2%"
    assert row(output, "a block's matrices, mlp")[-1] == "66.8%"
    assert row(output, "KV a token")[1] == "524,288"
    assert row(output, "KV at 4,096 positions, batch 16")[1:] == ["34,359,738,368", "34.4 GB", "32.0 GiB"]
    assert row(output, "mixed-precision Adam")[1] == "107,814,649,856"
    single = printed("llama-2-7b", "--dtype", "float16", "--context", 4096)
    assert row(single, "KV at 4,096 positions, batch 1")[-1] == "2.00 GiB"


def test_80_layers_by_dimensions():
    output = printed(
        "--layers", 80, "--hidden-size", 4096, "--heads", 32, "--dtype", "float16", "--context", 1000
    )  # fmt: skip
    assert row(output, "KV a token")[1] == "1,310,720"
    assert row(output, "KV at 1,000 positions, batch 1")[1] == "1,310,720,000"
    assert "--intermediate-size was not given" in output


def test_llama_3_1_70b_kv():
    assert row(printed("llama-3.1-70b", "--context", 8), "KV a token")[1] == "327,680"


def test_qwen_on_two_cards_is_refused_with_what_fits():
    output = printed("qwen2.5-32b", "--dtype", "fp16", "--context", 32_768, "--memory", "24GB", "--gpus", 2)
    assert row(output, "hidden state [1, 32,768, 5,120]")[1] == "335,544,320"
    assert "DOES NOT FIT on 2 × 24.0 GB" in output
    missing = 32_763_876_352 * 2 - 48_000_000_000
    assert f"the weights alone are {missing:,} B (17.5 GB) more than 48,000,000,000 B" in output
    assert "--dtype int4" in output
    assert "--gpus 4" in output


def test_reference_model(reference_config):
    output = printed(reference_config, "--dtype", "float32", "--prompt-length", 12, "--max-new-tokens", 6)
    assert row(output, "all")[1] == "180,800"
    assert row(output, "KV at 17 positions, batch 1")[1] == "17,408"
    assert row(output, "prefill, 12 tokens")[1:] == ["3,651,584", "3,719,168"]
    assert row(output, "decode at 13")[1] == "340,992"
    assert row(output, "generate, prefill and 5 decode steps")[2] == "5,434,368"
    assert row(output, "head, each step")[1] == "32,768"


def test_tied_weights_count_once(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **R_SIZES}))
    output = printed(tmp_path, "--context", 4)
    assert row(output, "all")[1] == "164,416"
    assert row(output, "lm_head")[1] == "the embedding's matrix"


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_catalogue_has_the_published_parameters(name):
    model = PlannedModel(config_from_catalogue(name), torch.bfloat16, None, name)
    assert model.parameters == catalogue()[name]["parameters"]
    assert sum(model.kinds.values()) == model.parameters
    assert "other" not in model.kinds


def test_latent_cache_is_read_from_the_model():
    groups = PlannedModel(config_from_catalogue("deepseek-v2-lite"), torch.bfloat16, None, "d").cache_groups(8)
    assert [(group.layers, group.position_numbers, group.heads) for group in groups] == [(27, 512 + 64, 1)]


def test_a_mixture_reads_the_experts_that_it_chooses():
    model = PlannedModel(config_from_catalogue("mixtral-8x7b"), torch.bfloat16, None, "m")
    step = model.decode_work(1, 8)
    assert (step.experts, step.chosen) == (8, 2)
    assert step.expert_bytes == 32 * 3 * 4096 * 14336 * 2  # of one expert of each of 32 layers
    attention, router, head = 2 * 4096 * 4096 + 2 * 4096 * 1024, 8 * 4096, 32_000 * 4096
    assert step.read_weight_bytes == 2 * (32 * (attention + router + 2 * 4096) + head + 4096 + 4096)


# -- plan against reality ----------------------------------------------------------------------


def real(kind, request, tmp_path):
    if kind == "smollm2":
        return AutoModelForCausalLM.from_pretrained(request.getfixturevalue("smollm2"))
    if kind == "reference":
        return request.getfixturevalue("model_r")
    return tiny_model(kind)


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("kind", ["smollm2", "mixtral", "mistral", "gpt2", "reference", "mamba", "qwen3_next"])
def test_planned_memory_is_what_a_run_holds(kind, attention, request, tmp_path):
    model = real(kind, request, tmp_path)
    if attention is not None:
        model.set_attn_implementation(attention)
    batch, prompt, new = 2, 24, 5
    ids = (torch.arange(prompt) % 90 + 5).repeat(batch, 1)
    model.generation_config.eos_token_id = None  # no end, and no processor that watches for it
    with LiveBytes(model) as live:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
        )
    held = sum(layer.logical_bytes for layer in kvcache.read(output.past_key_values))

    planned = PlannedModel(model.config, model.dtype, attention, kind)
    weights, context = planned.parameters * 4, prompt + new - 1
    kv = sum(group.bytes_at(batch, context) for group in planned.cache_groups(context))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    logits = [t for t in live.peaks[-1].tensors if t.role == "made" and t.shape[-1:] == (vocabulary,)]

    assert kv == held
    assert weights == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.01)
    assert weights + kv == pytest.approx(live.initial_bytes + held, rel=0.01)
    footprint = planned.footprint(batch, prompt, context)
    assert weights + footprint.highest.beside_weights == pytest.approx(live.peak.bytes_, rel=0.05)
    # weights are left out, so that a large model cannot hide what a run adds to them
    assert footprint.highest.beside_weights == pytest.approx(live.peak.bytes_ - live.initial_bytes, rel=0.05)
    if live.peaks[-1].module is None:  # the peak of the last step is its token choice
        assert sum(tensor.bytes_ for tensor in logits) == footprint.moments[-1].logits


def test_planned_flops_are_those_of_a_trace():
    planner = Planner(Request(model="sample_traces/demo"))
    assert {row.key: row.residual for row in against(planner)} == {
        "weights": 0, "kv": 0, "flops_prefill": 0, "flops_decode": 0,
    }  # fmt: skip


def test_a_trace_gives_the_settings_of_its_run():
    settings = Planner(Request(model="sample_traces/smollm2")).settings
    assert (settings.batch, settings.prompt_length, settings.context, settings.dtype) == (1, 4, 67, "float32")


def test_other_settings_than_the_trace_s_are_not_put_beside_it():
    assert against(Planner(Request(model="sample_traces/demo", batch=2))) == ()


def test_a_window_ends_the_cache():
    window = tiny_model("mistral").config.sliding_window
    groups = PlannedModel(tiny_model("mistral").config, torch.float32, None, "m").cache_groups(40)
    assert {group.capacity for group in groups} == {window - 1}


# -- what fits ---------------------------------------------------------------------------------


def test_largest_batch_and_context_are_the_last_that_fit(reference_config):
    planner = Planner(Request(str(reference_config), dtype="float32", context=64, memory="2MB"))
    batch, context = planner.fit.largest_batch, planner.fit.largest_context
    assert planner.needed(batch, 64) <= 2_000_000 < planner.needed(batch + 1, 64)
    assert planner.needed(1, context) <= 2_000_000 < planner.needed(1, context + 1)


def test_options_fit_when_they_are_taken(reference_config):
    base = {"model": str(reference_config), "dtype": "float32", "context": 400}
    eager, sdpa = (
        Planner(Request(**base, attention=name, memory="1GB")).fit.needed_bytes for name in ("eager", "sdpa")
    )
    base["memory"] = f"{(eager + sdpa) // 2}B"
    found = plan(Request(**base, attention="eager"))
    assert not found.fit.fits
    assert {"attn_implementation", "context"} <= {name for option in found.options for name in option.settings}
    for option in found.options:
        changed = {**base, "attention": "eager"} | {
            {"attn_implementation": "attention"}.get(name, name): value for name, value in option.settings.items()
        }
        again = Planner(Request(**changed)).fit
        assert again.fits
        assert again.spare_bytes == option.spare_bytes


def test_json_has_every_number_with_its_formula(reference_config):
    document = json.loads(printed(reference_config, "--context", 20, "--gpu", "H100 SXM", "--json"))
    assert document["memory"]["kv_per_token"] == {
        "value": 512, "unit": "B/token", "formula": "4 layers × 2 × 2 × 16 × 2 B",
    }  # fmt: skip
    assert [step["bound"] for step in document["steps"]] == ["memory", "memory"]
    assert document["fit"]["fits"] is True
    assert document["parameters"] == 180_800


def test_explain_shows_formulas(reference_config):
    output = printed(reference_config, "--context", 20, "--gpu", "H100 SXM", "--explain")
    assert "= 4 layers × 2 × 2 × 16 × 2 B" in output
    assert "= 180,800 parameters × 16 B" in output
    assert "÷ 3,350 GB/s" in output


def test_plot(reference_config, tmp_path):
    page = tmp_path / "plan.html"
    printed(reference_config, "--context", 20, "--gpu", "H100 SXM", "--plot", page)
    text = page.read_text()
    assert "memory over context" in text
    assert "1 \\u00d7 80.0 GB" in text


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_keep_to_the_terminal(reference_config, columns):
    output = printed(reference_config, "--context", 20, "--gpu", "H100 SXM", "--explain", columns=columns)
    assert max(map(len, output.splitlines())) <= columns


# -- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen2.5-31b"], "Did you mean qwen2.5-32b"),
        (["llama-2-7b", "--gpu", "H100"], "H100 PCIe, H100 SXM"),
        (["llama-2-7b", "--memory", "much"], "24GB"),
        (["llama-2-7b", "--dtype", "fp5"], "int4"),
        (["llama-2-7b", "--kv-dtype", "fp5"], "float8"),
        (["llama-2-7b", "--layers", 3], "leave out either"),
        (["--layers", 3, "--hidden-size", 100, "--heads", 3], "does not divide by 3 heads"),
        (["--layers", 3, "--hidden-size", 96, "--heads", 12, "--kv-heads", 5], "do not divide by 5 KV heads"),
        (["--layers", 0, "--hidden-size", 96, "--heads", 12], "--layers is 0"),
        (["--layers", 3, "--hidden-size", -96, "--heads", 12], "--hidden-size is -96"),
        (["--layers", 3, "--hidden-size", 96, "--heads", 12, "--vocab-size", 0], "--vocab-size is 0"),
        (["--layers", 10**7, "--hidden-size", 96, "--heads", 12], "layers are more than"),
        (["--layers", 3, "--hidden-size", 10**12, "--heads", 10], "between 1 and"),
        (["--layers", 3], "--heads at least"),
        (["gpt2", "--prompt-length", 50, "--context", 40], "does not go with a context"),
        (["/no/such/folder/config.json"], "does not exist"),
        (["some-owner/no-such-model"], "could not be had"),
    ],
)
def test_one_sentence_for_what_cannot_be(arguments, words):
    assert words in refused(*arguments)


def test_a_config_with_heads_that_do_not_divide(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_embd": 100, "n_head": 3}))
    assert "3 heads" in refused(path)


def test_dimensions_given():
    assert not Dimensions().given
    assert Dimensions(tied=True).given


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GB", 24 * 10**9), ("24 GiB", 24 * 2**30), ("80g", 80 * 10**9), ("1,000 B", 1000), ("1.5kB", 1500)],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


def test_an_amount_without_a_unit_may_be_any():
    with pytest.raises(UsageError, match="with its unit"):
        parse_bytes("24")


def test_planning_leaves_a_real_model_alone(model_r):
    before = model_r.config.to_dict()
    PlannedModel(model_r.config, torch.float32, None, "r").footprint(1, 4, 5)
    assert model_r.config.to_dict() == before
    assert isinstance(model_r, LlamaForCausalLM)
