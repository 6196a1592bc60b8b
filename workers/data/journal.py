"""The record of consumed samples, from which it is proved that none was lost and none was used twice.

Invariants: one line for each finished step, appended by a single write, so that a SIGKILL leaves whole lines; power
loss may leave a torn tail, which readers pass over and the next writer cuts off. A step that was done again after a
restore is in the journals of both generations; only the one on the lineage counts, which is what `effective_samples`
picks out.

Faults survived: SIGKILL between any two instructions; a full disk (the lines are kept and written when there is room).

A file holds one JSON object a line: {"step": 12, "samples": [[epoch, [id, ...]], ...]},
{"dropped": [epoch, [id, ...]]} or {"skipped": [epoch, batch, [id, ...]]}.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from workers.errors import CheckpointDamaged

Sample = tuple[int, int]
"""(epoch, sample id)"""


class SampleJournal:
    """Appends to one rank's journal of one generation; one writer at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)  # without its parents: a run directory that vanished is not made anew
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._unwritten = b""
        _cut_torn_tail(self._file, path)

    def record(self, step: int, samples: Iterable[Sample]) -> None:
        """Append the samples that this rank consumed in a step.

        Raises OSError if the disk does not take the line; it is kept then, and written before the next one.
        """
        epochs = groupby(samples, key=itemgetter(0))
        self._append({"step": step, "samples": [[epoch, [sample for _, sample in group]] for epoch, group in epochs]})

    def dropped(self, epoch: int, ids: Iterable[int]) -> None:
        """Append the sample ids that an epoch left out; raises OSError as `record` does."""
        self._append({"dropped": [epoch, list(ids)]})

    def skipped(self, epoch: int, batch: int, ids: Iterable[int]) -> None:
        """Append the sample ids of a global batch that the run skips; raises OSError as `record` does."""
        self._append({"skipped": [epoch, batch, list(ids)]})

    def close(self) -> None:
        os.close(self._file)

    def _append(self, entry: dict[str, Any]) -> None:
        self._unwritten += json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]


@dataclass(frozen=True, slots=True)
class JournalContent:
    """One journal: samples by step, in the order they were consumed, the ids left out by epoch, and those of skipped
    batches by (epoch, batch)."""

    steps: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    dropped: dict[int, tuple[int, ...]] = field(default_factory=dict)
    skipped: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


def read_journal(path: Path) -> JournalContent:
    """Read a journal; a last line without its end is passed over.

    Raises CheckpointDamaged, naming the file and the line, if a whole line is not what a journal holds.
    """
    content = JournalContent()
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if "step" in entry:
                step = int(entry["step"])
                samples = tuple((int(epoch), int(sample)) for epoch, ids in entry["samples"] for sample in ids)
                content.steps[step] = content.steps.get(step, ()) + samples
            elif "skipped" in entry:
                epoch, batch, ids = entry["skipped"]
                content.skipped[int(epoch), int(batch)] = tuple(int(sample) for sample in ids)
            else:
                epoch, ids = entry["dropped"]
                content.dropped[int(epoch)] = tuple(int(sample) for sample in ids)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(f"line {number} of the sample journal {path} is no record: {error!r}.") from error
    return content


@dataclass(frozen=True, slots=True)
class EffectiveSamples:
    """What the run's lineage consumed: every step once, from the generation whose work was kept.

    steps: step -> rank -> samples in the order they were consumed.
    skipped: ids by (epoch, batch) of the global batches that the run skips, reached yet or not.
    holes: (generation, rank, step) that should have a record and has none.
    """

    steps: dict[int, dict[int, tuple[Sample, ...]]]
    dropped: dict[int, tuple[int, ...]]
    holes: tuple[tuple[int, int, int], ...]
    skipped: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def samples_skipped(self) -> Iterator[Sample]:
        """All samples of the skipped batches."""
        for (epoch, _), ids in sorted(self.skipped.items()):
            for sample in ids:
                yield epoch, sample

    def samples(self) -> Iterator[Sample]:
        """All samples of all ranks, in the order of steps, then ranks."""
        for step in sorted(self.steps):
            for rank in sorted(self.steps[step]):
                yield from self.steps[step][rank]


def effective_samples(
    journals: Mapping[tuple[int, int], JournalContent], chain: Sequence[tuple[int, int, int]]
) -> EffectiveSamples:
    """Pick the records that count.

    journals: by (generation, rank); together they name all ranks.
    chain: the lineage, in any order: (generation, the step it restored, the last of its steps that counts), the last
        being what the next generation on the chain restored, or the last step finished. A generation's steps count from
        the one after its restored step to its last, both ends included.
    """
    ranks = sorted({rank for _, rank in journals})
    steps: dict[int, dict[int, tuple[Sample, ...]]] = {}
    dropped: dict[int, tuple[int, ...]] = {}
    skipped: dict[tuple[int, int], tuple[int, ...]] = {}
    holes: list[tuple[int, int, int]] = []
    for generation, restored_step, last_step in sorted(chain):
        for rank in ranks:
            journal = journals.get((generation, rank), JournalContent())
            dropped.update(journal.dropped)
            skipped.update(journal.skipped)
            for step in range(restored_step + 1, last_step + 1):
                if step in journal.steps:
                    steps.setdefault(step, {})[rank] = journal.steps[step]
                else:
                    holes.append((generation, rank, step))
    return EffectiveSamples(steps, dropped, tuple(holes), skipped)


@dataclass(frozen=True, slots=True)
class SampleAudit:
    """What differs between the samples that were due and the ones that were consumed; both sorted, repeats repeated.

    missing: due and not consumed, or consumed too few times.
    duplicated: consumed more often than due; a sample that was not due at all counts as well.
    """

    missing: tuple[Sample, ...]
    duplicated: tuple[Sample, ...]


def audit_samples(consumed: Iterable[Sample], due: Iterable[Sample], *, skipped: Iterable[Sample] = ()) -> SampleAudit:
    """Compare what was consumed with what was due: the samples of an uninterrupted run, or `DataOrder.handed_out`.

    `skipped` were not due after all.
    """
    had, wanted = Counter(consumed), Counter(due) - Counter(skipped)
    return SampleAudit(
        missing=tuple(sorted((wanted - had).elements())), duplicated=tuple(sorted((had - wanted).elements()))
    )


def _cut_torn_tail(file: int, path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.ftruncate(file, whole)
