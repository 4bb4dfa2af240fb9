"""How much a measured quantity differs between two sides, and how sure that is.

A side is a few calls (repeats of the same generate), each with one value or one a step. A call's
value is the median of its steps, a side's the mean of its calls. The uncertainty comes from
drawing calls, and within each call blocks of consecutive steps, anew (Davison and Hinkley, 1997,
sections 2.2 and 8.2: neighbouring steps resemble each other, so single ones would look surer than
they are). Of few calls a bootstrap is too sure of itself; its error is widened by √(n ÷ (n − 1))
and Student's t stands in place of the normal distribution, with the degrees of freedom of both
sides together: as if their calls varied alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import atan, cos, pi, sin, sqrt

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
RESAMPLES = 400
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Second side − first, with the bounds that hold it with the confidence that was asked for.

    `low` and `high` are null where a side has one call alone: then nothing is known of how much
    calls differ. `change` is relative to the first side; null where that is 0.
    """

    first: float
    second: float
    low: float | None
    high: float | None

    @property
    def delta(self) -> float:
        """Second − first."""
        return self.second - self.first

    @property
    def change(self) -> float | None:
        """The difference relative to the first side."""
        return self.delta / self.first if self.first else None

    @property
    def beyond_noise(self) -> bool | None:
        """Whether the bounds leave no difference out; null where there are none."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def difference(first: Sequence[Values], second: Sequence[Values], confidence: float = CONFIDENCE) -> Difference:
    """Compare two sides, each of one or more calls with one or more values.

    The same data gives the same bounds: the draws are seeded.
    """
    a, b = _side(first), _side(second)
    if min(len(first), len(second)) < 2:
        return Difference(a, b, None, None)
    random = np.random.default_rng(0)
    error = sqrt(sum(_error(calls, random) ** 2 for calls in (first, second)))
    reach = t_quantile(0.5 + confidence / 2, len(first) + len(second) - 2) * error
    return Difference(a, b, b - a - reach, b - a + reach)


def exact(first: float, second: float) -> Difference:
    """A difference between quantities that do not vary from call to call, such as bytes."""
    return Difference(first, second, second - first, second - first)


def _side(calls: Sequence[Values]) -> float:
    return float(np.mean([np.median(call) for call in calls]))


def _error(calls: Sequence[Values], random: np.random.Generator) -> float:
    """Standard error of a side, by drawing its calls and their steps anew."""
    medians = np.array([_medians(call, random) for call in calls])  # [calls, resamples]
    drawn = random.integers(len(calls), size=(len(calls), RESAMPLES))
    sides = medians[drawn, np.arange(RESAMPLES)].mean(axis=0)
    return float(np.std(sides)) * sqrt(len(calls) / (len(calls) - 1))


def _medians(call: Values, random: np.random.Generator) -> Values:
    """The call's value in each resample, of blocks of √n consecutive steps that may wrap around."""
    steps = len(call)
    if steps == 1:
        return np.full(RESAMPLES, call[0])
    block = max(1, round(sqrt(steps)))
    starts = random.integers(steps, size=(RESAMPLES, -(-steps // block), 1))
    chosen = (starts + np.arange(block)).reshape(RESAMPLES, -1)[:, :steps] % steps
    return np.asarray(np.median(call[chosen], axis=1))


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t at a probability of a half or more, by halving its closed form.

    Expansions around the normal distribution fall short where the gate needs them: of few calls, far out in the tail.
    """
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, degrees) < probability else (low, middle)
    return high


def _t_below(value: float, degrees: int) -> float:
    """Probability of less than a positive value (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, is_odd = atan(value / sqrt(degrees)), degrees % 2
    term, total = cos(angle) if is_odd else 1.0, 0.0
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= cos(angle) ** 2 * power / (power + 1)
    inside = sin(angle) * total
    return (1 + (2 / pi * (angle + inside) if is_odd else inside)) / 2
