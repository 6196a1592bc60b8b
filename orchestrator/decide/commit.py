"""From snapshots in memory to a committed checkpoint: who writes what, when it counts, and what can be restored.

A save goes  collecting -> ready -> writing -> committing -> done,  and may be given up at each point. A set of
snapshots that is not due to be written goes  collecting -> kept  and stays in memory until a newer set is complete. If
its generation fails it becomes ready, and is committed once.

Invariants:
- Written is only what ALL ranks have snapshotted; committed only what all ranks' keepers have written and read back in
  ONE attempt. Receipts of another attempt never count towards it. Nor is anything committed, or restorable, of which
  the ranks do not hold alike what they must; then their generation saves nothing any more.
- One save is written at a time. When it is done the newest complete one is next; those in between are skipped. A set
  that is not due to be written takes no save's place.
- A failed attempt's number is not ordered again: its directory may hold anything. (A coordinator that comes back may
  not know of the failure; keepers never overwrite, so it is told.)
- A snapshot's memory is released only when nothing needs it: neither a save, nor a restore, for which the newest
  snapshot that is complete on all ranks is kept.

Faults survived: events that come twice, late, or from a generation or attempt that is over (ignored; a keeper that
holds what nobody wants is told so again); a rank's death (keepers hold its snapshot and finish); a keeper's death (its
snapshots count as not taken until the ranks hand their memory over again; what it wrote still counts); a failing disk
(bounded attempts with growing waits, if the error may pass); the coordinator's own death (see `rebuilt`). Orders may
be repeated then, so a keeper answers one that it has carried out, or is carrying out, with the outcome of that.
"""

from collections.abc import Iterable, Mapping

from orchestrator.decide import replicas
from orchestrator.decide.lineage import GenerationRecord, chain
from orchestrator.decide.orders import ALL_STEPS, Abandon, Commit, Corruption, Decision, Persist, Release, Skip
from orchestrator.decide.save import Key, Phase, Save
from workers.checkpoint.manifest import ShardRecord, checkpoint_name

__all__ = ["ALL_STEPS", "Abandon", "Commit", "CommitMachine", "Corruption", "Decision", "Persist", "Release", "Skip"]

FAILURES_MAX = 3
"""Failures of one save, while it is written or committed, until it is given up."""
RETRY_SECONDS_BASE = 1.0
"""Wait before the second try; twice as long before the third."""

_GENERATION_ENDED = "its generation ended before all ranks had a snapshot"


class CommitMachine:
    """Takes events, returns decisions in the order to carry them out. `at` is a clock in seconds.

    Begins with `generation_started`. A coordinator that comes back in the middle of one passes rebuilding=True: then
    nothing is decided until `rebuilt`.
    """

    def __init__(self, *, rebuilding: bool = False) -> None:
        self._rebuilding = rebuilding
        self._found_committed: set[Key] = set()  # used while rebuilding
        self._current = 0
        self._worlds: dict[int, frozenset[int]] = {}
        self._limits: dict[int, int | None] = {}
        self._saves: dict[Key, Save] = {}
        self._over_upto = -1  # in the current generation no save begins any more up to this step
        # But for these, with their last attempts: the newest one that was given up, and the newest that was committed,
        # which is taken again only if the ranks say that they mean it.
        self._again: dict[Key, int] = {}
        self._again_if_asked: dict[Key, int] = {}
        # The newest set on the lineage that got complete in memory. Kept until there is a newer one, also when it is
        # committed, and when a keeper is lost: its ranks may hand their memory over again.
        self._in_memory: Save | None = None
        self._attempts: dict[Key, int] = {}  # the last one at what was given up
        self._released: dict[int, Release] = {}
        self._decisions: list[Decision] = []

    # Events

    def generation_started(self, generations: Iterable[GenerationRecord], *, at: float) -> list[Decision]:
        """A generation begins: the highest of `generations`, which are all records.

        What earlier ones hold goes on being saved if it lies on the new one's lineage, and is given up if not.
        """
        generations = tuple(generations)
        highest = max(record.number for record in generations)
        if highest <= self._current:
            return []
        self._current, self._over_upto, self._again, self._again_if_asked = highest, -1, {}, {}
        self._worlds = {record.number: frozenset(range(record.world_size)) for record in generations}
        self._limits = {link.generation: link.step_max for link in chain(generations)}
        self._hear_of(highest)
        for save in self._open():
            if not self._on_lineage(save.key):
                self._give_up(save, f"generation {highest} does not continue from it")
            elif save.phase is Phase.COLLECTING:
                self._give_up(save, _GENERATION_ENDED)
        if self._in_memory is not None and not self._on_lineage(self._in_memory.key):
            self._in_memory = _newest_complete(self._open())
        if self._in_memory is not None and self._in_memory.generation != highest:
            self._make_durable(self._in_memory)
        return self._decide(at)

    def snapshotted(
        self,
        rank: int,
        generation: int,
        step: int,
        *,
        at: float,
        attempt: int = 0,
        again: bool = False,
        durable: bool = True,
        digest: str = "",
        said: replicas.Said | None = None,
    ) -> list[Decision]:
        """A rank's snapshot of this step lies complete in its keeper's memory.

        `again`: it is to be saved also if this step is committed already. `durable`: it is due to be written. `digest`:
        tells it from another one of the same step. `said`: of replicas.

        While rebuilding, `attempt` is the last one of it that the keeper was ordered to write, 0 if there was none.
        """
        if self._rebuilding:
            self._hear_of(generation)
            if save := self._reported(rank, (generation, step)):
                save.add(rank, durable=durable, digest=digest, said=said or {})
                save.reported(attempt)
            return []
        if again:
            self._again |= self._again_if_asked
        save = self._find(rank, (generation, step))
        self._rank_is_past(rank, (generation, step))
        if save is None:
            in_memory = self._in_memory
            if in_memory is not None and in_memory.key == (generation, step) and in_memory.digests.get(rank) == digest:
                in_memory.snapshotted.add(rank)  # a keeper that came back has it
            return self._decide(at, answer=generation)
        save.add(rank, durable=durable, digest=digest, said=said or {})
        self._check_complete(save)
        return self._decide(at)

    def snapshot_skipped(
        self, rank: int, generation: int, step: int, *, reason: str, at: float, durable: bool = True
    ) -> list[Decision]:
        """A rank made no snapshot of this step, for instance because it had no free slot; `durable`: none that was due
        to be written."""
        if self._rebuilding:
            return []
        save = self._find(rank, (generation, step))
        self._rank_is_past(rank, (generation, step))
        wanted = save is not None and (durable or not save.durable)  # else it takes another one that is to be written
        if save is not None and wanted and save.phase is Phase.COLLECTING and rank not in save.snapshotted:
            save.durable = durable  # so that it is told of, also if no rank has made one
            self._give_up(save, f"rank {rank} made no snapshot: {reason}", again=True)
        return self._decide(at)

    def shard_persisted(
        self,
        rank: int,
        generation: int,
        step: int,
        attempt: int,
        shard: ShardRecord,
        *,
        at: float,
        said: replicas.Said | None = None,
    ) -> list[Decision]:
        """A keeper's receipt: the shard is written, durable, and reads back with equal digests. `said`: of replicas."""
        if self._rebuilding:
            known = self._reported(rank, (generation, step))
            if known is not None and known.reported(attempt):
                known.receipts[rank], known.said[rank] = shard, said or {}
            return []
        save = self._saves.get((generation, step))
        if save is not None and save.awaits(Phase.WRITING, attempt) and rank in save.ranks:
            save.receipts[rank], save.said[rank] = shard, said or {}
            if not save.unwritten:
                self._commit(save)
        return self._decide(at)

    def persist_failed(
        self, rank: int, generation: int, step: int, attempt: int, *, error: str, transient: bool, at: float
    ) -> list[Decision]:
        """A keeper could not write or verify its shard; `transient` if another attempt may succeed."""
        save = self._saves.get((generation, step))
        if save is not None and save.awaits(Phase.WRITING, attempt) and rank in save.ranks:
            self._failed(save, f"rank {rank}: {error}", transient, at)
        return self._decide(at)

    def keeper_lost(self, ranks: Iterable[int], *, at: float, generation: int | None = None) -> list[Decision]:
        """The keeper that held these ranks' snapshots (of one generation, or of all) is gone; what it wrote is not."""
        lost = frozenset(ranks)
        for save in self._open():
            gone = lost & save.snapshotted
            if not gone or generation not in (None, save.generation):
                continue
            save.snapshotted -= gone
            if save.phase is Phase.WRITING and (save.retry_at is not None or gone & set(save.unwritten)):
                self._unbegin(save, f"the keeper of rank {min(gone)} is lost")
            elif save.phase in (Phase.READY, Phase.KEPT):
                save.phase = Phase.COLLECTING
        if self._in_memory is not None and generation in (None, self._in_memory.generation):
            self._in_memory.snapshotted -= lost
        return self._decide(at)

    def generation_ended(self, generation: int, *, at: float) -> list[Decision]:
        """The generation is over and its keepers have reported all that they hold: no further snapshot gets complete.

        Saves that are complete go on, and the newest set in memory becomes one.
        """
        if generation == self._current and not self._rebuilding:
            self._over_upto = ALL_STEPS
            for save in self._open(Phase.COLLECTING):
                self._give_up(save, _GENERATION_ENDED)
            if self._in_memory is not None:
                self._make_durable(self._in_memory)
        return self._decide(at)

    def memory_dropped(self, generation: int, step: int, *, reason: str, at: float) -> list[Decision]:
        """This set in memory could not be restored: it is not to be used any more. What is being written of it is
        compared with its digests all the same."""
        key = (generation, step)
        save = self._saves.get(key)
        if save is not None and not save.under_way:
            self._give_up(save, reason)
        if self._in_memory is not None and self._in_memory.key == key:
            self._in_memory = None
        return self._decide(at)

    def memory_found(
        self, generation: int, step: int, *, digests: Mapping[int, str], committed: bool, at: float
    ) -> list[Decision]:
        """This set is about to be restored, for all of it is with keepers that are left, maybe as copies. It is written
        once, unless it is `committed`."""
        key = (generation, step)
        save = self._in_memory
        if save is not None and save.key == key and save.complete:
            return self._decide(at)
        self._hear_of(generation)
        if save is None or save.key != key:
            attempt = self._attempts.get(key, 0)
            ranks = self._worlds[generation]
            save = self._saves.get(key) or Save(generation=generation, step=step, ranks=ranks, attempt=attempt)
        if self._in_memory is not None and self._in_memory.key > key:
            self._give_up(self._in_memory, f"some of it is lost, and step {step} is restored")
        self._in_memory = save
        save.snapshotted, save.digests = set(save.ranks), dict(digests)
        if not committed and not save.under_way:
            self._saves[key] = save
            save.durable, save.phase = True, Phase.READY
        return self._decide(at)

    def committed(self, generation: int, step: int, attempt: int, *, at: float) -> list[Decision]:
        """The manifest of this attempt is in place. While rebuilding: it is found on disk."""
        save = self._saves.get((generation, step))
        if self._rebuilding:
            self._found_committed.add((generation, step))
        elif save is not None and save.phase is Phase.COMMITTING and save.attempt == attempt:
            del self._saves[save.key]
            self._again_if_asked = {save.key: save.attempt}
        return self._decide(at)

    def commit_failed(
        self, generation: int, step: int, attempt: int, *, error: str, transient: bool, at: float
    ) -> list[Decision]:
        """The manifest could not be written; `transient` if writing it again, with the same shards, may succeed."""
        save = self._saves.get((generation, step))
        if save is not None and save.awaits(Phase.COMMITTING, attempt):
            self._failed(save, error, transient, at)
        return self._decide(at)

    def tick(self, *, at: float) -> list[Decision]:
        """Time has passed: a due retry is made."""
        return self._decide(at)

    def rebuilt(self, *, at: float) -> list[Decision]:
        """All is told: the generations, `committed` for each manifest on disk, all snapshots and receipts of keepers.

        What was being written when the earlier coordinator died is finished first.
        """
        self._rebuilding = False
        committed = [self._saves.pop(key) for key in self._found_committed & self._saves.keys()]
        for save in committed:
            self._over(save.key)
        unlike = [save for save in self._open() if save.complete and replicas.differences(save.said)]
        for save in unlike:
            if save.key in self._saves:
                self._refuse(save, replicas.differences(save.said))
        spoilt = {save.generation for save in unlike}
        self._in_memory = _newest_complete(
            save for save in (*self._open(), *committed) if save.generation not in spoilt
        )
        begun = [save for save in self._open() if save.attempt and (save.complete or not save.unwritten)]
        if begun:
            save = max(begun, key=lambda save: (not save.unwritten, save.key))
            save.phase, save.durable = Phase.WRITING, True
            self._order(save) if save.unwritten else self._commit(save)
        for save in self._open():
            if save.key in self._saves:
                self._check_complete(save)
        if self._in_memory is not None and self._in_memory.generation != self._current:
            self._make_durable(self._in_memory)
        for save in self._open(Phase.COLLECTING):
            for rank in save.snapshotted:
                self._rank_is_past(rank, save.key)
            if save.generation != self._current:
                self._give_up(save, _GENERATION_ENDED)
        return self._decide(at)

    # Questions

    @property
    def in_flight(self) -> frozenset[str]:
        """Names of the attempts that are being written or committed."""
        saves = (save for save in self._open() if save.under_way)
        return frozenset(checkpoint_name(save.step, save.generation, save.attempt) for save in saves)

    def saves_newer(self, generation: int, step: int) -> bool:
        """Whether a state that is newer than this one is being written or committed."""
        return any(save.under_way and save.key > (generation, step) for save in self._open())

    @property
    def idle(self) -> bool:
        """Whether nothing is being saved or waits to be: no commit will come before another snapshot does."""
        return all(save.phase in (Phase.COLLECTING, Phase.KEPT) for save in self._open())

    @property
    def in_memory(self) -> Key | None:
        """Generation and step of the newest set that lies complete in the keepers' memory and may be restored."""
        save = self._in_memory
        if save is not None and not save.complete:  # a keeper is lost, and an older one may still be whole
            save = _newest_complete(self._open())
        return save.key if save is not None and not self._rebuilding else None

    @property
    def wakeup_at(self) -> float | None:
        """When `tick` is due, None if nothing waits for time to pass."""
        return min((save.retry_at for save in self._open() if save.retry_at is not None), default=None)

    # Rules

    def _open(self, phase: Phase | None = None) -> list[Save]:
        """The saves that are not over, in the order of time."""
        saves = (save for _, save in sorted(self._saves.items()))
        return [save for save in saves if phase is None or save.phase is phase]

    def _on_lineage(self, key: Key) -> bool:
        generation, step = key
        if generation not in self._limits:
            return False
        step_max = self._limits[generation]
        return step_max is None or step <= step_max

    def _hear_of(self, generation: int) -> None:
        self._released.setdefault(generation, Release(generation=generation, upto_step=-1, keep=()))

    def _find(self, rank: int, key: Key) -> Save | None:
        """The save that a rank's snapshot belongs to; None if it comes too late or makes no sense."""
        generation, step = key
        over = step <= self._over_upto and key not in self._again
        if key not in self._saves and (generation != self._current or over):
            return None
        return self._take(rank, key)

    def _reported(self, rank: int, key: Key) -> Save | None:
        """The save that a keeper's report belongs to; None if it can never count."""
        return self._take(rank, key) if self._on_lineage(key) else None

    def _take(self, rank: int, key: Key) -> Save | None:
        ranks = self._worlds.get(key[0], frozenset())
        if rank not in ranks:
            return None
        attempt = self._again.get(key, 0)
        return self._saves.setdefault(key, Save(generation=key[0], step=key[1], ranks=ranks, attempt=attempt))

    def _over(self, key: Key) -> None:
        if key[0] == self._current:
            self._over_upto = max(self._over_upto, key[1])

    def _check_complete(self, save: Save) -> None:
        """When all ranks have this step, nobody needs an older one that is not being written."""
        if not save.complete:
            return
        if differences := replicas.differences(save.said):
            self._refuse(save, differences)
            return
        if save.phase in (Phase.COLLECTING, Phase.KEPT):
            save.phase = Phase.READY if save.durable else Phase.KEPT
        self._over(save.key)
        self._again, self._again_if_asked = {}, {}
        if self._in_memory is None or self._in_memory.key <= save.key:
            self._in_memory = save
        self._give_up_older(save)

    def _give_up_older(self, save: Save) -> None:
        """Nobody needs them; but what is due to be written gives way only to what is, too."""
        for older in self._open():
            waits = older.phase is Phase.READY and save.phase is Phase.KEPT
            if older.key < save.key and not older.under_way and not waits:
                self._give_up(older, f"the snapshot of step {save.step} is newer and complete")

    def _make_durable(self, save: Save) -> None:
        if self._saves.get(save.key) is save and save.phase is Phase.KEPT:
            save.durable, save.phase = True, Phase.READY
            self._give_up_older(save)

    def _rank_is_past(self, rank: int, key: Key) -> None:
        """A rank snapshots in the order of steps: what it has not reported by now it never will."""
        if rank not in self._worlds.get(key[0], frozenset()):
            return
        for save in self._open(Phase.COLLECTING):
            if save.key < key and rank not in save.snapshotted:
                self._give_up(save, f"rank {rank} made no snapshot")

    def _failed(self, save: Save, reason: str, transient: bool, at: float) -> None:
        save.failures += 1
        if not transient or save.failures >= FAILURES_MAX:
            self._give_up(save, reason, again=True)
        elif save.phase is Phase.WRITING and not save.complete:
            self._unbegin(save, f"{reason}; and a keeper that would have to write again is lost")
        else:
            save.retry_at = at + RETRY_SECONDS_BASE * 2.0 ** (save.failures - 1)
            if save.phase is Phase.WRITING:
                self._abandon(save, reason, final=False)

    def _unbegin(self, save: Save, reason: str) -> None:
        """The attempt fails for want of snapshots; another follows if they turn up again."""
        self._abandon(save, reason, final=False)
        save.phase, save.retry_at = Phase.COLLECTING, None

    def _give_up(self, save: Save, reason: str, *, again: bool = False) -> None:
        if self._saves.pop(save.key, None) is None:
            return
        if save.attempt:
            self._attempts[save.key] = save.attempt
        if again and save.generation == self._current and save.step >= self._over_upto:
            self._again = {save.key: save.attempt}
        self._over(save.key)
        if save.under_way:
            self._abandon(save, reason, final=True)
        elif save.durable:
            self._decisions.append(Skip(generation=save.generation, step=save.step, reason=reason))

    def _abandon(self, save: Save, reason: str, *, final: bool) -> None:
        generation, step, attempt = save.generation, save.step, save.attempt
        self._decisions.append(Abandon(generation=generation, step=step, attempt=attempt, reason=reason, final=final))

    def _persist(self, save: Save) -> None:
        save.phase, save.attempt, save.retry_at = Phase.WRITING, save.attempt + 1, None
        save.receipts.clear()
        self._order(save)

    def _order(self, save: Save) -> None:
        generation, step, attempt = save.generation, save.step, save.attempt
        self._decisions.append(Persist(generation=generation, step=step, attempt=attempt, ranks=save.unwritten))

    def _commit(self, save: Save) -> None:
        if differences := replicas.differences(save.said):
            self._refuse(save, differences)
            return
        save.phase, save.retry_at = Phase.COMMITTING, None
        generation, step, attempt = save.generation, save.step, save.attempt
        shards = tuple(save.receipts[rank] for rank in sorted(save.ranks))
        self._decisions.append(Commit(generation=generation, step=step, attempt=attempt, shards=shards))

    def _refuse(self, save: Save, differences: tuple[replicas.Difference, ...]) -> None:
        """Give up all that the generation has not committed yet, and all that it may still snapshot."""
        generation, step, attempt = save.generation, save.step, save.attempt
        corruption = Corruption(generation=generation, step=step, attempt=attempt, differences=differences)
        self._decisions.append(corruption)
        for other in self._open():
            if other.generation == generation:
                self._give_up(other, replicas.describe(differences))
        if generation == self._current:
            self._over_upto, self._again = ALL_STEPS, {}
        if self._in_memory is not None and self._in_memory.generation == generation:
            self._in_memory = _newest_complete(self._open())  # of an earlier one, which is still being written

    def _decide(self, at: float, *, answer: int | None = None) -> list[Decision]:
        """Begin what can begin, release what is free; `answer`: the generation of a snapshot that nobody wants."""
        if self._rebuilding:
            return []
        under_way = next((save for save in self._open() if save.under_way), None)
        ready = next(iter(self._open(Phase.READY)), None)  # there is never more than one
        retry_at = under_way.retry_at if under_way is not None else None
        if under_way is not None and retry_at is not None:
            if under_way.phase is Phase.WRITING and ready is not None and ready.key > under_way.key:
                self._give_up(under_way, f"the snapshot of step {ready.step} is newer and complete")
                under_way = None
            elif at >= retry_at:
                self._persist(under_way) if under_way.phase is Phase.WRITING else self._commit(under_way)
        if under_way is None and ready is not None:
            self._persist(ready)
        if answer is not None and answer <= self._current:
            self._hear_of(answer)
        for generation in sorted(self._released):
            self._release(generation, again=generation == answer)
        decisions, self._decisions = self._decisions, []
        return decisions

    def _release(self, generation: int, *, again: bool) -> None:
        upto_step = self._over_upto if generation == self._current else ALL_STEPS
        needed = {*self._saves, *([self._in_memory.key] if self._in_memory is not None else [])}
        keep = tuple(sorted(step for owner, step in needed if owner == generation and step <= upto_step))
        release = Release(generation=generation, upto_step=upto_step, keep=keep)
        if again or release != self._released[generation]:
            self._decisions.append(release)
        self._released[generation] = release
        if generation != self._current and not keep:
            del self._released[generation]  # nothing of it is wanted; a late report is answered all the same


def _newest_complete(saves: Iterable[Save]) -> Save | None:
    return max((save for save in saves if save.complete), key=lambda save: save.key, default=None)
