"""Cold steps: the first of a kind, over twice as slow as those after it."""

import time

import lifetrace
from lifetrace.analysis import latency
from lifetrace.cold import ColdWatch


def watched(*walls):
    watch = ColdWatch()
    for step, (kind, wall_ns) in enumerate(walls):
        watch.note(kind, step, wall_ns)
    return watch.cold()


def test_the_first_of_a_kind_is_cold_above_twice_the_median_of_the_rest():
    assert watched(("a", 21), ("a", 10), ("a", 9), ("a", 11)) == {0}
    assert watched(("a", 20), ("a", 10), ("a", 9), ("a", 11)) == set()


def test_a_later_slow_step_is_not_cold():
    assert watched(("a", 10), ("a", 90), ("a", 10)) == set()


def test_each_kind_has_a_first_step_and_two_others_must_say_what_is_usual():
    assert watched(("p", 90), ("d", 50), ("d", 10), ("p", 10), ("d", 10)) == {1}


def test_a_slow_first_decode_is_left_out_of_the_gaps(model_r, prompt_12, tmp_path):
    """60 ms of sleep in the second forward; a step of R takes a few."""
    forwards = []

    def sleep_once(*_):
        forwards.append(1)
        if len(forwards) == 2:
            time.sleep(0.06)

    model_r.generate(prompt_12, max_new_tokens=4)
    model_r.model.norm.register_forward_pre_hook(sleep_once)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        model_r.generate(prompt_12, max_new_tokens=8)
    assert trace.steps.index[trace.steps.warmup].tolist() == [1]
    times = latency(lifetrace.read_trace(tmp_path / "t"))
    assert times.itl_p99_ns < 60e6
    assert times.tpot_ns > 60e6 / 7  # what the call really took stays so
