"""The global random generators of this rank: Python, NumPy, torch's CPU generator, and that of each CUDA device.

Invariants: each rank saves and restores its own; capturing draws nothing and opens no CUDA context.
"""

import random
from typing import Any

import numpy as np
import torch

from workers.errors import EnvironmentProblem
from workers.state import tree


class GlobalGenerators:
    """The state of all of them, tracked like an object."""

    def state_dict(self) -> dict[str, Any]:
        version, words, next_gauss = random.getstate()
        return {
            "python": {"version": version, "words": np.array(words, np.uint32), "next_gauss": next_gauss},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": [generator.get_state() for generator in _cuda_generators()],
        }

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Raises EnvironmentProblem if the saved rank had more CUDA devices."""
        if len(states["cuda"]) > torch.cuda.device_count():
            raise EnvironmentProblem(
                f"the checkpoint holds the random generators of {len(states['cuda'])} CUDA devices, but this rank sees "
                f"{torch.cuda.device_count()}; give each rank as many as it had"
            )
        python = states["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["next_gauss"]))
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if states["cuda"]:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            for generator, state in zip(_cuda_generators(), states["cuda"], strict=False):
                generator.set_state(state)

    def digests(self) -> dict[str, str]:
        """A hash of each generator's state, by name: "python", "numpy", "torch", "cuda.0"."""
        states = self.state_dict()
        cuda = {f"cuda.{index}": state for index, state in enumerate(states.pop("cuda"))}
        return {name: tree.digest(state, name) for name, state in {**states, **cuda}.items()}


def _cuda_generators() -> tuple[torch.Generator, ...]:
    """None before the rank has used CUDA: then they hold nothing that training depends on."""
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
