"""How often the run fails: what a few failures, and their absence, say, by cause and domain."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.decide.causes import CAUSES
from orchestrator.decide.failure_rate import (
    BURST_SECONDS,
    FAILURES_PER_NODE_DAY,
    NO_FAILURES,
    Domain,
    FailureRate,
    prior_from_cluster,
)
from orchestrator.decide.gamma import gamma_probability, mixture_quantile
from orchestrator.decide.hazard import Hazard, Prior

HOUR = 3600.0
DAY = 86400.0


def rate(per_second: float = 1 / HOUR, *, ranks: int = 8) -> FailureRate:
    return FailureRate(Prior(failures_per_second=per_second), ranks=ranks)


def failing(subject: FailureRate, gaps: list[float], *, cause: str = "signal", domain: Domain = "process") -> float:
    """With these gaps; returns when the last one came."""
    at = 0.0
    for gap in gaps:
        at += gap
        subject.failed(at, cause=cause, domain=domain)
    return at


def drawn(n: int, mtbf: float, *, seed: int = 0, shape: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.weibullvariate(mtbf / math.gamma(1 + 1 / shape), shape) for _ in range(n)]


# ---------------------------------------------------------------- the prior


def test_the_prior_is_the_published_rate_per_node_day() -> None:
    prior = prior_from_cluster(2048)
    assert prior.failures_per_second == pytest.approx(2048 * FAILURES_PER_NODE_DAY / DAY)
    assert prior_from_cluster(4, 0.01).failures_per_second == pytest.approx(0.04 / DAY)
    posterior = FailureRate(prior).posterior(0.0)
    assert posterior.low_per_second < prior.failures_per_second < posterior.high_per_second


def test_a_prior_without_caution_has_its_rate_as_mean() -> None:
    subject = FailureRate(Prior(failures_per_second=1 / HOUR, caution=1.0), node_share=0.25)
    assert subject.posterior(0.0).mean_per_second == pytest.approx(1 / HOUR)
    assert subject.posterior(0.0, "node").mean_per_second == pytest.approx(0.25 / HOUR)
    assert subject.posterior(0.0, "process").mean_per_second == pytest.approx(0.75 / HOUR)


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_a_prior_that_is_ten_times_off_is_overruled_by_ten_failures(wrong: float) -> None:
    truth = 1 / HOUR
    found = []
    for seed in range(40):
        subject = rate(wrong * truth)
        at = failing(subject, drawn(10, HOUR, seed=seed))
        found.append(subject.posterior(at).mean_per_second)
    assert sum(found) / len(found) == pytest.approx(truth, rel=0.35)


def test_time_without_failures_counts_before_the_first_one_comes() -> None:
    subject = rate(1 / HOUR)
    means = [subject.posterior(at).mean_per_second for at in (0.0, HOUR, 10 * HOUR, 100 * HOUR)]
    assert all(later < earlier for earlier, later in pairwise(means))
    assert means[-1] < 0.01 / HOUR
    assert subject.hazard_per_second(100 * HOUR) < 0.02 / HOUR


# ---------------------------------------------------------------- what is counted


def test_failures_within_a_minute_of_the_first_count_once() -> None:
    once, burst = rate(), rate()
    failing(once, [HOUR, HOUR])
    failing(burst, [HOUR, 20.0, 39.0, HOUR - 59.0])
    assert burst.posterior(3 * HOUR) == once.posterior(3 * HOUR)
    endless = rate()
    failing(endless, [HOUR] + [50.0] * 10)  # a minute after the first, the next one counts again
    assert endless.posterior(2 * HOUR).failures > once.posterior(3 * HOUR).failures
    apart = rate()
    failing(apart, [HOUR, BURST_SECONDS])
    assert apart.posterior(2 * HOUR).failures > 2.0


def test_a_burst_belongs_to_its_widest_domain_and_to_its_first_cause() -> None:
    subject, node = rate(), rate()
    subject.failed(HOUR, cause="signal", domain="process")
    subject.failed(HOUR + 5.0, cause="agent_lost", domain="node")
    subject.failed(HOUR + 9.0, cause="exception", domain="process")
    node.failed(HOUR, cause="signal", domain="node")
    for domain in ("process", "node", None):
        assert subject.posterior(2 * HOUR, domain) == node.posterior(2 * HOUR, domain)
    assert list(subject.by_cause(2 * HOUR)) == [("node", "signal")]


@pytest.mark.parametrize("cause", sorted(NO_FAILURES))
def test_what_saving_more_often_would_not_help_against_is_no_failure(cause: str) -> None:
    subject = rate()
    subject.failed(HOUR, cause=cause, domain="node")
    assert subject.posterior(2 * HOUR) == rate().posterior(2 * HOUR)
    assert subject.by_cause(2 * HOUR) == {}


def test_domains_and_causes_are_told_apart() -> None:
    subject = rate()
    at = failing(subject, [HOUR] * 30)
    subject.failed(at + HOUR, cause="agent_lost", domain="node")
    at += HOUR
    process, node = subject.posterior(at, "process"), subject.posterior(at, "node")
    assert process.mean_per_second > 10 * node.mean_per_second
    shares = subject.by_cause(at)
    assert set(shares) == {("process", "signal"), ("node", "agent_lost")}
    assert shares["process", "signal"].mean_per_second == pytest.approx(process.mean_per_second, rel=0.1)
    assert shares["node", "agent_lost"].mean_per_second == pytest.approx(node.mean_per_second, rel=0.5)


def test_the_rate_grows_with_the_world_and_what_was_learnt_goes_along() -> None:
    subject = rate(ranks=8)
    at = failing(subject, drawn(40, HOUR))
    before, hazard = subject.posterior(at + 60), subject.hazard_per_second(at + 60, 60)
    subject.resized(at + 60, 32)
    after = subject.posterior(at + 60)
    assert after.mean_per_second == pytest.approx(4 * before.mean_per_second)
    assert after.high_per_second == pytest.approx(4 * before.high_per_second, rel=1e-6)
    assert after.failures == pytest.approx(before.failures)
    assert subject.hazard_per_second(at + 60, 15) == pytest.approx(4 * hazard)
    # Fails four times as often, as expected: nothing to learn from that.
    for gap in drawn(40, HOUR / 4, seed=1):
        at += gap
        subject.failed(at + 60, cause="signal", domain="process")
    assert subject.posterior(at + 60).mean_per_second == pytest.approx(4 / HOUR, rel=0.3)


# ---------------------------------------------------------------- how well it is estimated


def test_the_rate_lies_in_the_credible_interval_as_often_as_that_says() -> None:
    inside = 0
    for seed in range(300):
        subject = rate(3 / HOUR)
        at = failing(subject, drawn(15, HOUR, seed=seed))
        posterior = subject.posterior(at)
        inside += posterior.low_per_second < 1 / HOUR < posterior.high_per_second
    assert 0.85 < inside / 300 <= 0.97


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_rate_that_changes_ten_times_is_followed_within_a_few_failures(factor: float) -> None:
    found = []
    for seed in range(40):
        subject = rate()
        gaps = drawn(60, HOUR, seed=seed) + drawn(8, HOUR / factor, seed=1000 + seed)
        at = failing(subject, gaps)
        found.append(subject.posterior(at).mean_per_second * HOUR / factor)
    assert 0.5 < sum(found) / len(found) < 2.0


def test_failures_that_come_in_clusters_make_the_next_one_likelier_at_first() -> None:
    subject = rate()
    at = failing(subject, drawn(200, HOUR, seed=3, shape=0.6))
    assert subject.hazard_per_second(at + 60, 60) > 2 * subject.hazard_per_second(at + 2 * HOUR, 60)
    # The rates of that law, at 5 minutes and at 2 hours.
    scale = HOUR / math.gamma(1 + 1 / 0.6)
    for age in (300.0, 2 * HOUR):
        true = 0.6 / scale * (age / scale) ** -0.4
        assert subject.hazard_per_second(at + age) == pytest.approx(true, rel=0.35)


def test_memoryless_failures_are_taken_for_that_whatever_the_age() -> None:
    ratios = []
    for seed in range(20):
        subject = rate()
        at = failing(subject, drawn(100, HOUR, seed=seed))
        ratios.append(subject.hazard_per_second(at + 60) / subject.hazard_per_second(at + HOUR))
    assert sorted(ratios)[10] == pytest.approx(1.0, abs=0.15)
    assert all(0.6 < ratio < 1.7 for ratio in ratios)


def test_after_hundreds_of_failures_a_year_without_one_is_believed() -> None:
    subject = rate()
    at = failing(subject, drawn(400, HOUR))
    assert subject.hazard_per_second(at + 365 * DAY) < 0.02 / HOUR
    assert subject.posterior(at + 365 * DAY).mean_per_second < 0.02 / HOUR
    assert 0.0 < subject.hazard_per_second(at + 1e12) < 1e-9


@given(st.lists(st.floats(0.0, 1e7), max_size=30), st.floats(0.0, 1e9), st.floats(0.0, 1e8))
def test_rates_are_positive_and_finite_whatever_happens(gaps: list[float], age: float, ahead: float) -> None:
    subject = rate()
    at = failing(subject, gaps) + age
    posterior = subject.posterior(at)
    for value in (
        subject.hazard_per_second(at, ahead),
        posterior.low_per_second,
        posterior.mean_per_second,
        posterior.high_per_second,
    ):
        assert 0.0 < value < math.inf
    assert posterior.low_per_second <= posterior.high_per_second


def test_with_one_model_the_estimate_is_the_closed_form() -> None:
    hazard = Hazard.from_prior(
        Prior(failures_per_second=1 / HOUR, weight_failures=2.0, caution=1.0),
        shapes=((1.0, 1.0),),
        discounts=((0.5, 1.0),),
    )
    for gap in (600.0, 1200.0):
        hazard = hazard.after(gap)
    a, b = 0.5 * (0.5 * 2 + 1) + 1, 0.5 * (0.5 * 2 * HOUR + 600) + 1200
    assert hazard.memoryless(300.0) == [(pytest.approx(1.0), pytest.approx(a), pytest.approx(b + 300))]
    assert hazard.per_second(290.0, 20.0) == pytest.approx(a / (b + 300))


# ---------------------------------------------------------------- the Gamma distribution


@given(st.floats(0.0, 50.0))
def test_gamma_probabilities_are_their_closed_forms(x: float) -> None:
    assert gamma_probability(1.0, x) == pytest.approx(-math.expm1(-x), abs=1e-12)
    assert gamma_probability(0.5, x) == pytest.approx(math.erf(math.sqrt(x)), abs=1e-12)
    assert gamma_probability(3.0, x) == pytest.approx(1 - math.exp(-x) * (1 + x + x * x / 2), abs=1e-11)


@given(st.floats(0.1, 500.0), st.floats(0.01, 0.99))
def test_quantiles_invert_probabilities(a: float, probability: float) -> None:
    quantile = mixture_quantile(probability, [(1.0, a, 7.0)])
    assert gamma_probability(a, 7.0 * quantile) == pytest.approx(probability, abs=1e-6)


def test_a_mixture_lies_between_its_parts() -> None:
    parts = [(0.5, 2.0, 1.0), (0.5, 200.0, 1.0)]
    assert mixture_quantile(0.25, parts) == pytest.approx(mixture_quantile(0.5, [(1.0, 2.0, 1.0)]), rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_prior_that_makes_no_sense_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="failures_per_second is"):
        Prior(failures_per_second=value)
    with pytest.raises(ValueError, match="caution is"):
        Prior(failures_per_second=1.0, caution=value)


def test_other_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="nodes is 0"):
        prior_from_cluster(0)
    with pytest.raises(ValueError, match="node_share is 1"):
        FailureRate(Prior(failures_per_second=1.0), node_share=1.0)
    with pytest.raises(ValueError, match="ranks is 0"):
        rate().resized(1.0, 0)


def test_every_cause_that_costs_work_counts() -> None:
    assert set(CAUSES) - NO_FAILURES == set(CAUSES) - {"drain", "controller", "restore_failed"}
