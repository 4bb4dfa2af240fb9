"""Runs side by side: real traces of the embedded model, one of them with 40 ms of sleep in one layer's MLP."""

import json
import time
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from stored_traces import MS, one_call, write_trace
from transformers import AutoModelForCausalLM

import lifetrace
from lifetrace.analysis import compare as comparing
from lifetrace.analysis.trace import read_traces
from lifetrace.cli import main

PROMPT = torch.arange(5, 20)[None]


@pytest.fixture(scope="module")
def demo():
    folder = str(resources.files("lifetrace.demo_model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def record(model, path, repeats=4, prompt=PROMPT, tokens=16, **options):
    model.generate(prompt, max_new_tokens=4)
    with lifetrace.trace(model, out=path, **options):
        for _ in range(repeats):
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return path


@pytest.fixture(scope="module")
def runs(demo, tmp_path_factory):
    """A run, the same again, and one with a sleep in the MLP of layer 3."""
    folder = tmp_path_factory.mktemp("runs")
    record(demo, folder / "a")
    record(demo, folder / "b")
    handle = demo.model.layers[3].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.04))
    record(demo, folder / "slow")
    handle.remove()
    return folder


def command(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)], env={"COLUMNS": "120"})


def test_a_sleep_in_one_layers_mlp_is_named_and_the_gate_fails(runs):
    result = command(runs / "a", runs / "slow", "--fail-above", "5%")
    assert result.exit_code == 1
    found = comparing.compare(read_traces(runs / "a"), read_traces(runs / "slow"))
    assert {cause.phase: (cause.layer, cause.part) for cause in found.causes}["decode"] == (3, "mlp")
    decode = next(row for row in found.headline if row.name == "decode step")
    assert decode.difference.beyond_noise
    assert "is in layer 3, mlp" in result.stdout
    assert "decode layer, mlp" in result.stderr


def test_the_other_way_round_it_is_faster_and_the_gate_passes(runs):
    result = command(runs / "slow", runs / "a", "--fail-above", "0.05")
    assert result.exit_code == 0
    assert "faster" in result.stdout
    assert "No regression above 5.0% beyond the noise" in result.stderr


def test_a_run_against_itself_is_the_same(runs):
    found = comparing.compare(read_traces(runs / "a"), read_traces(runs / "a"))
    assert not found.changes
    assert not found.causes
    assert all(row.difference.delta == 0 for row in (*found.headline, *found.stages))
    assert command(runs / "a", runs / "a", "--fail-above", "0%").exit_code == 0


def test_equal_runs_fail_in_five_of_a_hundred_at_most(demo, tmp_path):
    """16 real repeats, split at random into two sides of 5 a hundred times: the gate may fail by luck in 5."""
    (trace,) = read_traces(record(demo, tmp_path / "t", repeats=16, tokens=12))
    whole = comparing._Side.of([trace])
    random = np.random.default_rng(0)
    failed = sum(bool(fails(*halves(whole, random))) for _ in range(100))
    assert failed <= 5


def halves(side, random):
    order = random.permutation(min(side.calls, len(side.ttft_ns)))  # a call that was cold has no first token's time

    def part(chosen):
        def pick(calls):
            return [calls[i] for i in chosen]

        return replace(
            side,
            calls=len(chosen),
            ttft_ns=pick(side.ttft_ns),
            tpot_ns=pick(side.tpot_ns),
            phase_ns={key: pick(calls) for key, calls in side.phase_ns.items()},
            stages={key: pick(calls) for key, calls in side.stages.items() if len(calls) == side.calls},
        )

    return part(order[:5]), part(order[5:10])


def fails(first, second):
    return comparing.regressions(first, second, ["prefill", "decode"], 0.05)[0]


def test_several_traces_in_a_folder_are_repeats_of_one_side(runs, tmp_path):
    (tmp_path / "side").mkdir()
    for name in ("a", "b"):
        (tmp_path / "side" / name).symlink_to(runs / name)
    found = comparing.compare(read_traces(tmp_path / "side"), read_traces(runs / "slow"))
    assert found.calls == (8, 4)


def test_another_model_is_not_compared(runs, model_r, prompt_12, tmp_path):
    record(model_r, tmp_path / "r", repeats=2, prompt=prompt_12)
    result = command(runs / "a", tmp_path / "r", "--fail-above", "5%")
    assert result.exit_code == 2
    assert "another model" in " ".join(result.stdout.split())
    assert "The gate cannot judge these runs" in result.stderr
    assert "differs: model parameters: 2755008 → 180800" in result.stdout


def test_of_another_prompt_length_decode_is_compared(demo, runs, tmp_path):
    record(demo, tmp_path / "long", prompt=torch.arange(5, 45)[None], repeats=2)
    found = comparing.compare(read_traces(runs / "a"), read_traces(tmp_path / "long"))
    assert found.refused == ["the prompts have 15 and 40 tokens: prefill and TTFT are not compared, decode is"]
    assert {row.name for row in found.headline} == {"TPOT", "decode step"}
    assert {row.phase for row in found.stages} == {"decode"}


def test_a_single_call_is_shown_and_not_judged(demo, runs, tmp_path):
    record(demo, tmp_path / "one", repeats=1)
    result = command(runs / "a", tmp_path / "one", "--fail-above", "5%")
    assert result.exit_code == 2
    assert "trace each at least twice" in result.stderr
    assert "decode step" in result.stdout


def test_other_detail_compares_what_both_have(demo, runs, tmp_path):
    record(demo, tmp_path / "layer", repeats=2, detail="layer")
    found = comparing.compare(read_traces(runs / "a"), read_traces(tmp_path / "layer"))
    assert "layer" in {row.stage for row in found.stages}
    assert "mlp" not in {row.part for row in found.stages}
    assert any("the detail differs" in note for note in found.notes)


def test_hand_made_times_give_hand_made_differences(tmp_path):
    """The second run's decode steps are those of the first: 4, 5 and 6 ms; of one call, so nothing is judged."""
    first, second = (read_traces(one_call(tmp_path / name)) for name in ("a", "b"))
    found = comparing.compare(first, second)
    step = next(row for row in found.headline if row.name == "decode step")
    assert step.difference.first == 5e6  # the median
    layer = next(row for row in found.stages if row.name == "layer" and row.phase == "prefill")
    assert (layer.difference.first, layer.share) == (6e6, 0.6)


def hand_made(path, calls, kind="generate", every=1, cold=()):
    """Calls of steps (phase, ms in layer 0, ms in the head); the spans of each `every`th step of a call are there."""
    steps, spans, facts, at = [], [], [], 0
    for call, rows in enumerate(calls):
        began = at
        for ordinal, (phase, layer, head) in enumerate(rows):
            step = len(steps)
            begins = {"call": call, "step": step, "phase": phase, "role": "main", "start_ns": at * MS}
            cached = 0 if phase == "prefill" else 3
            steps.append(begins | {"wall_ns": (layer + head) * MS, "warmup": step in cold, "kv_len_before": cached})
            places = [("layer", 0, layer), ("lm_head", None, head)] if ordinal % every == 0 else []
            for stage, number, took in places:
                place = {"step": step, "phase": phase, "stage": stage, "layer": number}
                spans.append(place | {"span": len(spans), "host_ns": took * MS, "start_ns": at * MS})
            at += layer + head
        first = began + sum(layer + head for phase, layer, head in rows if phase == "prefill")
        times = {"request_start_ns": began * MS, "first_token_ns": first * MS, "last_token_ns": at * MS}
        size = {"sequences": 1, "prompt_tokens": [3], "new_tokens": [len(rows)]}
        facts.append({"call": call, "kind": kind, "parent_step": None, **times, **size})
    return write_trace(path, {"steps": steps, "spans": spans}, calls=facts if kind == "generate" else [])


def compared(first, second):
    return comparing.compare(read_traces(first), read_traces(second))


def headline(found):
    return {row.name: (row.difference.first / MS, row.difference.second / MS) for row in found.headline}


ONCE = [("prefill", 2, 1), *[("decode", 4, 1)] * 4]
SLOWER = [("prefill", 2, 1), *[("decode", 7, 1)] * 4]


@pytest.mark.parametrize("every", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_the_cause_is_of_the_steps_that_were_recorded(tmp_path, every):
    """Layer 0 takes 7 ms in place of 4, whichever of the steps have spans."""
    first = hand_made(tmp_path / "a", [ONCE] * 2, every=every[0])
    (cause,) = compared(first, hand_made(tmp_path / "b", [SLOWER] * 2, every=every[1])).causes
    assert (cause.stage, cause.layer, cause.delta_ns, cause.share) == ("layer", 0, 3 * MS, 1.0)


def test_a_prefill_in_chunks_is_compared_as_one(tmp_path):
    """Three chunks of 2 ms in the layer and 1 in the head: 4 and 2 ms more than one, though no step takes longer."""
    first = hand_made(tmp_path / "a", [ONCE] * 2)
    found = compared(first, hand_made(tmp_path / "b", [[ONCE[0]] * 3 + ONCE[1:]] * 2))
    assert headline(found)["prefill step"] == (3, 9)
    (cause,) = found.causes
    assert (cause.phase, cause.stage, cause.delta_ns) == ("prefill", "layer", 4 * MS)


def test_loops_of_a_programs_own_are_its_calls(tmp_path):
    """Each of their forwards is a call of the trace: it is the loops that repeat, not the forwards."""
    loops = [[step] for step in ONCE * 2]
    one, two = (hand_made(tmp_path / name, forwards, kind="forward") for name, forwards in
                (("one", loops[:5]), ("two", loops)))  # fmt: skip
    assert compared(two, two).calls == (2, 2)
    found = compared(two, one)
    assert found.calls == (2, 1)
    assert {row.difference.beyond_noise for row in found.headline} == {None}
    assert headline(found) == {"prefill step": (3, 3), "decode step": (5, 5)}


def test_a_cold_prefill_is_no_time_to_the_first_token(tmp_path):
    cold = [("prefill", 90, 1), *ONCE[1:]]
    first = hand_made(tmp_path / "a", [cold, ONCE, ONCE], cold={0})
    assert headline(compared(first, hand_made(tmp_path / "b", [ONCE] * 3)))["TTFT"] == (3, 3)


def test_a_side_of_other_work_is_refused(tmp_path, runs):
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "a").symlink_to(runs / "a")
    hand_made(tmp_path / "side" / "b", [ONCE] * 2)
    meta = json.loads((tmp_path / "side" / "b" / "run.json").read_text())
    (tmp_path / "side" / "b" / "run.json").write_text(json.dumps(meta | {"model": {"parameters": 7, "layers": 1}}))
    assert "another model" in compared(tmp_path / "side", runs / "a").refused[0]


def test_a_side_without_calls_is_said_to_have_none(demo, runs, tmp_path):
    result = command(runs / "a", record(demo, tmp_path / "none", repeats=0), "--fail-above", "5%")
    assert result.exit_code == 2
    assert "a side has no call that gave tokens" in " ".join(result.stderr.split())


def test_json_and_the_page(runs, tmp_path):
    page = tmp_path / "page.html"
    result = command(runs / "a", runs / "slow", runs / "b", "--json", "-o", page, "--fail-above", "5%")
    slow, same = json.loads(result.stdout)
    assert slow["causes"][-1]["layer"] == 3
    assert slow["gate"]["regressions"]
    assert same["gate"]["judged"] > 10
    row = next(row for row in slow["headline"] if row["name"] == "decode step")
    assert row["difference"]["beyond_noise"] is True
    text = page.read_text()
    assert text.count("<section>") == 2
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "nothing to compare with"),
        (["a", "nowhere"], "no folder nowhere"),
        (["a", "b", "--fail-above", "x"], "'x'"),
    ],
)
def test_mistakes_end_in_a_sentence(runs, monkeypatch, arguments, says):
    monkeypatch.chdir(runs)
    result = command(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
