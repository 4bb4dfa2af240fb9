"""How sure a difference is: known quantiles, exact cases, and coverage over many draws of known noise."""

import numpy as np
import pytest

from lifetrace.analysis import noise


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (6, 2.447), (10, 2.228), (30, 2.042), (1000, 1.962)],
)
def test_quantiles_of_students_t(degrees, expected):
    """Any statistics book's table of t at 97.5 %."""
    assert noise.t_quantile(0.975, degrees) == pytest.approx(expected, abs=0.0006)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 636.619), (2, 31.599), (3, 12.924), (4, 8.610), (5, 6.869), (10, 4.587), (60, 3.460)]
)
def test_quantiles_far_out_where_the_gate_looks(degrees, expected):
    """The same tables at 99.95 %."""
    assert noise.t_quantile(0.9995, degrees) == pytest.approx(expected, abs=0.0006)


def calls(*values):
    return [np.array(value, dtype=float) for value in values]


def test_a_side_is_the_mean_of_its_calls_medians():
    found = noise.difference(calls([1, 2, 9], [4, 4, 4]), calls([5, 5, 5], [7, 7, 8]))
    assert (found.first, found.second, found.delta) == (3.0, 6.0, 3.0)
    assert found.change == 1.0


def test_equal_calls_have_no_noise():
    found = noise.difference(calls([10, 10], [10, 10]), calls([11, 11], [11, 11]))
    assert (found.low, found.high, found.beyond_noise) == (1.0, 1.0, True)


def test_of_one_call_nothing_is_judged():
    found = noise.difference(calls([1, 2, 3]), calls([2, 3, 4], [2, 3, 4]))
    assert (found.low, found.high, found.beyond_noise) == (None, None, None)
    assert found.delta == 1.0


@pytest.mark.parametrize(("repeats", "steps"), [(3, 1), (3, 40), (5, 40)])
def test_equal_sides_differ_beyond_the_noise_in_one_of_twenty_at_most(repeats, steps):
    """Calls that differ by 3 %, steps by 5 %: 300 pairs of equal sides. 7 % allows for the draw of 300 itself."""
    random = np.random.default_rng(1)

    def side():
        return [100 * (1 + 0.03 * random.normal() + 0.05 * random.normal(size=steps)) for _ in range(repeats)]

    wrong = sum(bool(noise.difference(side(), side()).beyond_noise) for _ in range(300))
    assert wrong <= 0.07 * 300


def test_a_true_difference_is_found():
    random = np.random.default_rng(2)

    def side(middle):
        return [middle * (1 + 0.01 * random.normal() + 0.03 * random.normal(size=40)) for _ in range(5)]

    found = sum(bool(noise.difference(side(100), side(108)).beyond_noise) for _ in range(50))
    assert found >= 48


def test_bounds_are_the_same_each_time():
    random = np.random.default_rng(3)
    sides = [[random.normal(size=9) for _ in range(3)] for _ in range(2)]
    assert noise.difference(*sides) == noise.difference(*sides)
