"""Pulses of ranks, as agents send them."""

from typing import Any

from workers.messages import RankPulse

PULSE_SECONDS = 0.5


def a_pulse(at: float, **fields: Any) -> RankPulse:
    """Of a rank that trains; `at` in seconds."""
    values: dict[str, Any] = {
        "agent": "a",
        "generation": 1,
        "at": at,
        "step": 0,
        "loss": None,
        "phase": "training",
        "label": "",
        "allowance_seconds": 0.0,
        "moves": 0,
        "still_seconds": 0.0,
        "step_seconds": (),
        "stepped": True,
        "sequence": 0,
        "tick": int(at / PULSE_SECONDS),
        "cpu_seconds": 0.0,
        "state": "S",
    }
    return RankPulse(**{**values, **fields})
