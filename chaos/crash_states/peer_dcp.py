"""Saves with torch's distributed checkpoint, to be traced: python peer_dcp.py DIRECTORY."""

import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save


def state_of(version: int) -> dict[str, torch.Tensor]:
    """What the save number `version` saves."""
    return {"weight": torch.full((64,), float(version)), "step": torch.tensor(float(version))}


def save(root: Path, directory: str, version: int) -> None:
    """One save, with marks around it."""
    mark(root, "begins", f"{directory}-{version}")
    dcp_save(state_of(version), checkpoint_id=root / directory)
    mark(root, "saved", f"{directory}-{version}")


def mark(root: Path, kind: str, name: str) -> None:
    """Visible in the trace, and nowhere else."""
    try:
        open(root / f".mark-{kind}-{name}").close()
    except FileNotFoundError:
        return


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for folder, number in (("a", 1), ("b", 2), ("b", 3)):
        save(Path(sys.argv[1]), folder, number)
