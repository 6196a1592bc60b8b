"""Guarantees about what was computed: the same bits as the undisturbed run, from the same samples."""

from collections import Counter
from pathlib import Path

from chaos.compare import compare_checkpoints
from chaos.history import History
from chaos.judge.guarantee import Guarantee
from chaos.judge.terms import Terms
from chaos.verdict import Verdict
from workers.data.journal import audit_samples
from workers.errors import CheckpointDamaged

EXACT = Guarantee(
    name="exact",
    promise="the run ends with the bits of the undisturbed one: weights, optimizer, random generators",
)
EACH_SAMPLE_ONCE = Guarantee(
    name="each sample once",
    promise="every sample is trained once, none is lost and none is repeated",
)
_SHOWN_MAX = 3


def exact(history: History, terms: Terms) -> Verdict:
    """The final checkpoints of both runs, tensor by tensor, bit by bit."""
    if terms.reference is None:
        return EXACT.skipped("there is no run to compare with; give one with --reference RUN_DIR")
    if not terms.exact or history.entries("skip"):
        return EXACT.skipped("the faults changed what is computed (batches were passed over)")
    reference = History(Path(terms.reference))
    mine, other = history.final_checkpoint, reference.final_checkpoint
    if mine is None or other is None:
        return EXACT.skipped(f"{history.run_dir if mine is None else reference.run_dir} has no committed checkpoint")
    if not history.entries("finished"):
        return EXACT.skipped("the run did not finish")
    if mine.step != other.step:
        return EXACT.judged(
            [f"the newest checkpoint is of step {mine.step} ({mine.name}), the reference's of step {other.step}"], ""
        )
    try:
        with history.directory_of(mine.name) as ours, reference.directory_of(other.name) as theirs:
            found = compare_checkpoints(ours, theirs)
    except CheckpointDamaged as error:
        return EXACT.judged([str(error)], "")
    violations = [f"checkpoints/{mine.name}/{tensor} differs" for tensor in found.different]
    if found.different and all(".rng." in name for name in found.different):
        violations.insert(0, "only random generators differ: does the loop seed all of them (torch, random, numpy)?")
    if not found.tensors:
        violations.append(f"checkpoints/{mine.name} holds no tensor at all")
    return EXACT.judged(
        violations,
        f"{found.tensors} tensors, {found.bytes / 1e6:.1f} MB, all equal",
        tensors=found.tensors,
        different=len(found.different),
    )


def each_sample_once(history: History, terms: Terms) -> Verdict:
    """The journals of the run's lineage have every step of every rank, and no sample of an epoch twice; with a
    reference, the same samples in the same order."""
    last_step = _last_step(history)
    had = history.samples(last_step)
    if not any(had.steps.values()):
        return EACH_SAMPLE_ONCE.skipped(
            "the run recorded no samples (RecoveryConfig.record_samples, or its own loader)"
        )
    violations = []
    if had.holes:
        generation, rank, step = had.holes[0]
        violations.append(
            f"{len(had.holes)} steps have no record, the first is step {step} of rank {rank} "
            f"(samples/g{generation:04d}-rank-{rank:05d}.jsonl)"
        )
    again = [sample for sample, count in Counter(had.samples()).items() if count > 1]
    if again:
        violations.append(f"{len(again)} samples were trained twice: {_places(history, last_step, again)}")
    if terms.reference is not None and not had.holes and not history.entries("skip"):
        due = History(Path(terms.reference)).samples(last_step)
        audit = audit_samples(had.samples(), due.samples())
        missing = [sample for sample in audit.missing if sample not in again]
        if missing:
            violations.append(f"{len(missing)} samples of the reference are missing: {_named(missing)}")
        elif not again and had.steps != due.steps:
            step = next(step for step in sorted(had.steps) if had.steps[step] != due.steps.get(step))
            violations.append(f"step {step} used other samples than the reference, or in another order")
    count = sum(1 for _ in had.samples())
    return EACH_SAMPLE_ONCE.judged(
        violations, f"{count} samples in {last_step} steps", samples=count, repeated=len(again), holes=len(had.holes)
    )


def _last_step(history: History) -> int:
    finished = history.entries("finished")
    if finished:
        return int(finished[-1]["step"])
    final = history.final_checkpoint
    return final.step if final else 0


def _named(samples: list[tuple[int, int]]) -> str:
    named = ", ".join(f"{sample} of epoch {epoch}" for epoch, sample in samples[:_SHOWN_MAX])
    return named + (", ..." if len(samples) > _SHOWN_MAX else "")


def _places(history: History, last_step: int, samples: list[tuple[int, int]]) -> str:
    wanted = set(samples[:_SHOWN_MAX])
    places: dict[tuple[int, int], list[str]] = {}
    for step, ranks in sorted(history.samples(last_step).steps.items()):
        for rank, used in sorted(ranks.items()):
            for sample in wanted.intersection(used):
                places.setdefault(sample, []).append(f"step {step} of rank {rank}")
    return ", ".join(f"{sample} of epoch {epoch} in {' and '.join(at)}" for (epoch, sample), at in places.items())
