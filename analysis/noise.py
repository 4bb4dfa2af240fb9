"""How much a measured quantity differs between two sides, and how sure that is.

A side is a few calls (repeats of the same generate), each with one value or one a step. A call's
value is the median of its steps, a side's the mean of its calls. The uncertainty comes from
drawing calls, and within each call blocks of consecutive steps, anew (Davison and Hinkley, 1997,
sections 2.2 and 8.2: neighbouring steps resemble each other, so single ones would look surer than
they are). Of few calls a bootstrap is too sure of itself; its error is widened by √(n ÷ (n − 1))
and Student's t stands in place of the normal distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

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
    values = [_side(calls) for calls in (first, second)]
    if min(len(first), len(second)) < 2:
        return Difference(*values, None, None)
    random = np.random.default_rng(0)
    error = sqrt(sum(_error(calls, random) ** 2 for calls in (first, second)))
    reach = t_quantile(0.5 + confidence / 2, len(first) + len(second) - 2) * error
    delta = values[1] - values[0]
    return Difference(*values, delta - reach, delta + reach)


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


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Hill's expansion (1970) to 1 ÷ n⁴."""
    if degrees == 1:
        return float(np.tan(np.pi * (probability - 0.5)))
    if degrees == 2:
        return (2 * probability - 1) / sqrt(2 * probability * (1 - probability))
    z, n = NormalDist().inv_cdf(probability), degrees
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)
