"""The Gamma distribution's probabilities and quantiles, for credible intervals. Pure formulas."""

import math
from collections.abc import Sequence

_ROUNDS = 500
_EPSILON = 1e-14


def gamma_probability(a: float, x: float) -> float:
    """That a Gamma variable of shape a > 0 and rate 1 is at most x: the regularized incomplete gamma function P(a, x).

    By its power series for x < a + 1, else by the continued fraction of 1 - P (Abramowitz and Stegun 6.5.29, 6.5.31).
    """
    if x <= 0.0:
        return 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        for n in range(1, _ROUNDS):
            term *= x / (a + n)
            total += term
            if term < total * _EPSILON:
                break
        return front * total
    # Lentz's method.
    b = x + 1.0 - a
    c = math.inf
    d = 1.0 / b
    fraction = d
    for n in range(1, _ROUNDS):
        part = -n * (n - a)
        b += 2.0
        d = 1.0 / (part * d + b)
        c = b + part / c
        fraction *= c * d
        if abs(c * d - 1.0) < _EPSILON:
            break
    return 1.0 - front * fraction


def mixture_quantile(probability: float, parts: Sequence[tuple[float, float, float]]) -> float:
    """The x below which a mixture of Gamma variables, each given as weight, shape and rate, lies with this probability.

    Weights sum to 1. Found by bisection of the logarithm; what is below 1e-30 of the mean counts as that.
    """
    mean = sum(weight * a / b for weight, a, b in parts)
    low, high = 1e-30 * mean, 1e3 * mean
    for _ in range(200):
        middle = math.sqrt(low * high)
        below = sum(weight * gamma_probability(a, b * middle) for weight, a, b in parts)
        low, high = (middle, high) if below < probability else (low, middle)
        if high < low * (1.0 + 1e-9):
            break
    return high
