"""The kinds of time of `accounting`, as pages show them: grouped, named, and each with a colour of the style sheet."""

from collections.abc import Mapping

KIND_NAMES: Mapping[str, str] = {
    "productive": "useful training",
    "repeated": "steps done again",
    "saving": "saving",
    "startup": "starting",
    "recovering": "detecting and restarting",
    "down": "no driver",
}
"""In the order in which they are shown."""

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "saving": ("save_stall", "save_interference"),
    "recovering": ("detection", "recovery", "restore"),
}


def grouped(seconds: Mapping[str, float]) -> dict[str, float]:
    """By the names above."""
    return {name: sum(seconds.get(kind, 0.0) for kind in _GROUPS.get(name, (name,))) for name in KIND_NAMES}
