"""How often the run fails, by cause and failure domain. Failures and clock readings in, rates out.

Invariants:
- Each domain, and all failures together, has an estimate of its own (hazard.py): a discounted Gamma-Poisson posterior,
  in which the time since the last failure counts. So has each cause that has struck, memoryless, its prior an equal
  part of its domain's.
- Failures within `BURST_SECONDS` of the first of them count once, in the widest of their domains, under the cause that
  came first: a gang-scheduled job dies once.
- Rates are per rank inside, so a run that grows or shrinks takes what it has learnt with it.
- The estimate is a function of what happened, in its order: rebuilt from the ledger it is what it was.

`at` is the run's clock in seconds: the time that generations have run so far, without the time between them. It never
goes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.decide.causes import CAUSES, UNCHARGED
from orchestrator.decide.gamma import mixture_quantile
from orchestrator.decide.hazard import MEMORYLESS, Hazard, Prior

BURST_SECONDS = 60.0

FAILURES_PER_NODE_DAY = 6.5e-3
"""Of nodes with eight GPUs, as published by Kokolis et al. 2024 for the larger of Meta's research clusters (RSC-1);
the smaller one had 2.34e-3. Llama 3's training had 419 unexpected interruptions in 54 days on 2,048 nodes (A.
Grattafiori et al., "The Llama 3 herd of models", 2024): 3.8e-3. It is a prior: a few failures, or their absence,
overrule it."""

NODE_SHARE = 0.5
"""Part of the failures that is believed to take the node with it, before there is data."""

NO_FAILURES = UNCHARGED | {"restore_failed"}
"""Causes after which nothing is lost that saving more often would have kept."""

_CAUSES = len(set(CAUSES) - NO_FAILURES)
_SECONDS_PER_DAY = 86400.0

Domain = Literal["process", "node"]
DOMAINS: tuple[Domain, ...] = ("process", "node")
"""What a failure takes with it, the narrowest first: the process, or the node with all memory in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePosterior:
    """What is believed of a rate, if it is memoryless. `low_per_second`, `high_per_second`: the rate lies between them
    with 90 % probability. `failures`, `exposure_seconds`: what that rests on, discounted, the prior included."""

    mean_per_second: float
    low_per_second: float
    high_per_second: float
    failures: float
    exposure_seconds: float


def prior_from_cluster(
    nodes: int, failures_per_node_day: float = FAILURES_PER_NODE_DAY, *, weight_failures: float = 0.5
) -> Prior:
    """For a run on so many nodes."""
    if nodes < 1:
        raise ValueError(f"nodes is {nodes!r}; it has to be at least 1")
    return Prior(failures_per_second=nodes * failures_per_node_day / _SECONDS_PER_DAY, weight_failures=weight_failures)


class _Track:
    """`last_at`: of the last failure, or of the start, on the clock that runs faster the more ranks there are. What
    followed from the failures is computed when somebody asks, for of most tracks nobody does."""

    __slots__ = ("_before", "_hazard", "last_at")

    def __init__(self, hazard: Hazard | None, last_at: float = 0.0, before: "_Track | None" = None) -> None:
        self._hazard, self.last_at, self._before = hazard, last_at, before

    def after(self, at: float) -> "_Track":
        return _Track(None, at, self)

    @property
    def hazard(self) -> Hazard:
        known, gaps = self, []
        while known._hazard is None and known._before is not None:
            gaps.append(known.last_at - known._before.last_at)
            known = known._before
        hazard = known._hazard
        assert hazard is not None
        for gap in reversed(gaps):
            hazard = hazard.after(gap)
        self._hazard, self._before = hazard, None
        return hazard


_Key = tuple[str | None, str | None]  # domain and cause; None: all


class FailureRate:
    """`prior`: of all failures, at the world size `ranks`; `node_share`: the part of them that takes the node."""

    def __init__(self, prior: Prior, *, ranks: int = 1, node_share: float = NODE_SHARE) -> None:
        if not 0.0 < node_share < 1.0:
            raise ValueError(f"node_share is {node_share!r}; it has to be above 0 and below 1")
        shares: dict[str | None, float] = {None: 1.0, "process": 1.0 - node_share, "node": node_share}
        self._priors = {domain: _part(prior, rate=share) for domain, share in shares.items()}
        self._tracks: dict[_Key, _Track] = {
            (domain, None): _Track(Hazard.from_prior(part)) for domain, part in self._priors.items()
        }
        self._ranks_first = ranks
        self._ranks = ranks
        self._resized_at = 0.0
        self._resized_scaled = 0.0
        self._burst: _Burst | None = None

    def failed(self, at: float, *, cause: str, domain: Domain) -> None:
        """Causes of which saving is no cure (NO_FAILURES) change nothing."""
        if cause in NO_FAILURES:
            return
        burst = self._burst
        if burst is not None and at - burst.at < BURST_SECONDS:
            if DOMAINS.index(domain) <= DOMAINS.index(burst.domain):
                return
            at, cause = burst.at, burst.cause
            self._tracks = dict(burst.tracks_before)
        self._burst = _Burst(at=at, cause=cause, domain=domain, tracks_before=dict(self._tracks))
        scaled = self._scaled(at)
        if (domain, cause) not in self._tracks:
            # Gamma variables of equal rate add up: such parts of the domain's prior make up the whole of it.
            part = _part(self._priors[domain], rate=1.0 / _CAUSES, weight=1.0 / _CAUSES)
            self._tracks[domain, cause] = _Track(Hazard.from_prior(part, shapes=MEMORYLESS))
        for key in ((None, None), (domain, None), (domain, cause)):
            self._tracks[key] = self._tracks[key].after(scaled)

    def resized(self, at: float, ranks: int) -> None:
        """From now on the run has so many ranks."""
        if ranks < 1:
            raise ValueError(f"ranks is {ranks!r}; it has to be at least 1")
        self._resized_scaled = self._scaled(at)
        self._resized_at = at
        self._ranks = ranks

    def posterior(self, at: float, domain: Domain | None = None) -> RatePosterior:
        """Of the failures of this domain, or of all."""
        return self._posterior(at, self._tracks[domain, None])

    def by_cause(self, at: float) -> dict[tuple[Domain, str], RatePosterior]:
        """Of each cause that has struck, by the domain that it struck."""
        return {
            (domain, cause): self._posterior(at, self._tracks[domain, cause])
            for domain in DOMAINS
            for other, cause in self._tracks
            if other == domain and cause is not None
        }

    def hazard_per_second(self, at: float, ahead_seconds: float = 0.0, domain: Domain | None = None) -> float:
        """The rate over the time ahead, adjusted for the time since the last failure as far as the data support that:
        what intervals are decided from."""
        track, scale = self._tracks[domain, None], self._scale
        return scale * track.hazard.per_second(self._scaled(at) - track.last_at, scale * ahead_seconds)

    def age_seconds(self, at: float, domain: Domain | None = None) -> float:
        """Since the last failure, at today's world size."""
        return (self._scaled(at) - self._tracks[domain, None].last_at) / self._scale

    @property
    def _scale(self) -> float:
        return self._ranks / self._ranks_first

    def _scaled(self, at: float) -> float:
        return self._resized_scaled + (at - self._resized_at) * self._scale

    def _posterior(self, at: float, track: _Track) -> RatePosterior:
        scale = self._scale
        parts = track.hazard.memoryless(self._scaled(at) - track.last_at)
        scaled = [(weight, a, b / scale) for weight, a, b in parts]
        return RatePosterior(
            mean_per_second=sum(weight * a / b for weight, a, b in scaled),
            low_per_second=mixture_quantile(0.05, scaled),
            high_per_second=mixture_quantile(0.95, scaled),
            failures=sum(weight * a for weight, a, _ in scaled),
            exposure_seconds=sum(weight * b for weight, _, b in scaled),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Burst:
    """Failures that count once, so far: when the first came, its cause, and what was believed before."""

    at: float
    cause: str
    domain: Domain
    tracks_before: Mapping[_Key, _Track]


def _part(prior: Prior, *, rate: float, weight: float = 1.0) -> Prior:
    return replace(
        prior, failures_per_second=prior.failures_per_second * rate, weight_failures=prior.weight_failures * weight
    )
