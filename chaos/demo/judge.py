"""The demo's verdict: each claim, what the histories of both runs say about it, and whether it holds."""

import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.compare import Comparison, compare_checkpoints
from chaos.demo.plan import RANDOM_MOMENT
from chaos.history import History, Recovery
from workers.checkpoint.manifest import CHECKPOINTS_DIR
from workers.data.journal import SampleAudit, audit_samples

Rows = list[tuple[str, str, bool]]


def judge(attacked_dir: Path, reference_dir: Path, *, planned_kills: int, steps: int) -> tuple[dict[str, Any], Rows]:
    """Judge the attacked run by its own history and by the reference run's.

    Returns the report, with the truth of each claim under "claims", and the same claims as rows of a table.
    """
    attacked, reference = History(attacked_dir), History(reference_dir)
    recoveries = attacked.recoveries()
    comparison = _compare_final(attacked, reference)
    had, due = attacked.samples(steps), reference.samples(steps)
    audit = audit_samples(had.samples(), due.samples())
    torn, stale = attacked.torn_restores(), attacked.stale_restores()
    workers_restarted = max(0, len(attacked.ray_workers()) - _ranks(attacked))
    final_steps = [_final_step(attacked), _final_step(reference)]

    claims: dict[str, tuple[str, str, bool]] = {
        "attacked_as_planned": (
            "ranks were killed, inside saves and at a random moment",
            ", ".join(recovery.during for recovery in recoveries) or "no kill",
            len(recoveries) == planned_kills
            and RANDOM_MOMENT in {recovery.during for recovery in recoveries}
            and all(recovery.exit_code == -signal.SIGKILL for recovery in recoveries),
        ),
        "recovered": (
            "training went on after each kill",
            _recovery_text(recoveries),
            all(recovery.recovery_seconds is not None for recovery in recoveries),
        ),
        "finished": (
            "both runs finished all steps",
            f"{final_steps[0]} and {final_steps[1]}",
            final_steps == [steps] * 2,
        ),
        "ray_workers_stayed": (
            "Ray's workers stayed",
            f"{workers_restarted} of {_ranks(attacked)} restarted",
            len(attacked.ray_workers()) == _ranks(attacked) > 0,
        ),
        "newest_restored": (
            "each restart went on from the newest committed step, or a newer one in memory",
            "; ".join(stale)
            or "steps " + ", ".join(f"{recovery.restored_step} ({recovery.source})" for recovery in recoveries),
            not stale,
        ),
        "never_torn": (
            "nothing torn was restored",
            "; ".join(torn) or "every checkpoint as committed, every snapshot as digested",
            not torn,
        ),
        "each_sample_once": (
            "each sample was used once, in the same order",
            _samples_text(sum(1 for _ in due.samples()), audit),
            not (audit.missing or audit.duplicated or had.holes or due.holes)
            and had.steps == due.steps
            and bool(due.steps),
        ),
        "bitwise_equal": (
            "weights, optimizer and RNG equal the undisturbed run's",
            f"{comparison.tensors} tensors, {comparison.bytes / 1e6:.1f} MB, {len(comparison.different)} differ",
            comparison.bitwise_equal,
        ),
    }
    first = recoveries[0] if recoveries else None
    report = {
        "bitwise_equal": comparison.bitwise_equal,
        "kills": len(recoveries),
        "killed_during": [recovery.during for recovery in recoveries if recovery.during != RANDOM_MOMENT],
        "newest_committed_step": first.newest_committed_step if first else None,
        "restored_step": first.restored_step if first else None,
        "restored_from": first.source if first else None,
        "lost_steps": first.lost_steps if first else None,
        "recovery_seconds": first.recovery_seconds if first else None,
        "ray_workers_restarted": workers_restarted,
        "samples_missing": len(audit.missing),
        "samples_duplicated": len(audit.duplicated),
        "torn_restores": len(torn),
        "run_dir": str(attacked_dir),
        "reference_run_dir": str(reference_dir),
        "recoveries": [asdict(recovery) for recovery in recoveries],
        "tensors_compared": comparison.tensors,
        "tensors_different": list(comparison.different),
        "claims": {name: holds for name, (_, _, holds) in claims.items()},
    }
    return report, list(claims.values())


def _compare_final(attacked: History, reference: History) -> Comparison:
    left, right = attacked.final_checkpoint, reference.final_checkpoint
    if left is None or right is None or left.step != right.step:
        return Comparison(tensors=0, bytes=0, different=())
    return compare_checkpoints(
        attacked.run_dir / CHECKPOINTS_DIR / left.name, reference.run_dir / CHECKPOINTS_DIR / right.name
    )


def _final_step(history: History) -> int:
    final = history.final_checkpoint
    return final.step if final else 0


def _ranks(history: History) -> int:
    return history.generations[-1].world_size if history.generations else 0


def _recovery_text(recoveries: Sequence[Recovery]) -> str:
    parts = [
        "never"
        if recovery.recovery_seconds is None
        else f"{recovery.recovery_seconds:.2f} s, {recovery.lost_steps} steps lost"
        for recovery in recoveries
    ]
    return "; ".join(parts)


def _samples_text(due: int, audit: SampleAudit) -> str:
    return f"{due} samples, {len(audit.missing)} missing, {len(audit.duplicated)} duplicated"
