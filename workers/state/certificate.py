"""The resume certificate: a fingerprint of what the next step will use.

It is taken with each save, and again before the first step after a restore. Equal certificates mean that the next step
sees the same samples, learning rates, loss scale and random numbers as it would have without the interruption. Fields
are named so that a difference says what was lost: "data.next_ids", "lr.optimizer", "rng.numpy".
"""

from collections.abc import Mapping
from typing import Any

from workers.errors import ResumeMismatch
from workers.state.objects import ObjectPart
from workers.state.optimizer import OptimizerPart
from workers.state.rng import GlobalGenerators

_ABSENT = "absent"


def certify(optimizers: list[OptimizerPart], objects: list[ObjectPart]) -> dict[str, Any]:
    """The fields of the certificate with their JSON values."""
    certificate: dict[str, Any] = {f"rng.{name}": digest for name, digest in GlobalGenerators().digests().items()}
    for optimizer in optimizers:
        certificate[f"lr.{optimizer.name}"] = [repr(rate) for rate in optimizer.learning_rates()]
        certificate[f"steps.{optimizer.name}"] = optimizer.step_counts()
    for part in objects:
        if part.kind == "data" and hasattr(part.value, "next_sample_ids"):
            certificate[f"{part.name}.next_ids"] = list(part.value.next_sample_ids())
        elif part.kind in ("data", "scheduler"):
            certificate[f"{part.name}.state"] = part.digest()
        elif callable(scale := getattr(part.value, "get_scale", None)):
            certificate[f"scale.{part.name}"] = repr(float(scale()))
    return certificate


def differing_fields(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields whose values differ, or that only one of them has."""
    return sorted(field for field in {*saved, *current} if saved.get(field, _ABSENT) != current.get(field, _ABSENT))


def rebased(saved: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """`saved`, when the next step was changed on purpose: `before` and `after` were taken on either side of the change.

    A field that was not as saved before the change stays, so that the difference is still found.
    """
    changed = [field for field in differing_fields(before, after) if before.get(field) == saved.get(field)]
    return {**saved, **{field: after[field] for field in changed}}


def require_equal(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ResumeMismatch listing the fields that differ."""
    if fields := differing_fields(saved, current):
        shown = "; ".join(
            f"{field} was {_shown(saved.get(field, _ABSENT))}, is {_shown(current.get(field, _ABSENT))}"
            for field in fields
        )
        raise ResumeMismatch(
            f"the next step would not be the one that the saved run was about to take: {shown}; look for code that "
            f"changes these between session.restore() and the first step"
        )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value[:8]))}{', ...' if len(value) > 8 else ''}]"
    return str(value)
