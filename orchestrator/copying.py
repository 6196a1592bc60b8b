"""Copies of snapshots on other nodes: orders them, knows what they are good for when a node is lost.

When to copy what is decided in decide/replication.py, where a set can be restored from in decide/holdings.py; this is
the wiring between them, the keepers and the ledger.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.decide import holdings
from orchestrator.decide.lineage import GenerationRecord, MemorySet, chain
from orchestrator.decide.replicas import differences
from orchestrator.decide.replication import Copy, Keep, Replication
from orchestrator.decide.save import Key
from orchestrator.observe.ledger import Ledger, read_ledger
from orchestrator.roster import KeeperRoster
from workers.keeper_messages import CopyOrder, DropCopies, HeldSnapshot, KeeperJoined, ReleaseOrder, ShardCopied
from workers.messages import RestoreOrder

logger = logging.getLogger("lastgood")

_LEDGER_SECONDS = 60.0
"""How often the ledger says how far copies are, at most."""


class Copying:
    """`enabled`: whether copies are made at all. `keepers` are named by their names as members."""

    def __init__(
        self,
        *,
        enabled: bool,
        ledger: Ledger,
        keepers: KeeperRoster,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled = enabled
        self._ledger = ledger
        self._keepers = keepers
        self._clock = clock
        self._replication = Replication()
        self._records: tuple[GenerationRecord, ...] = ()
        self._released: dict[int, ReleaseOrder] = {}
        self._holdings: dict[str, list[HeldSnapshot]] = {}
        entries = [entry for entry in read_ledger(ledger.path) if entry["kind"] in ("corruption", "memory_dropped")]
        self._spoilt = {(e["generation"], e["step"] if e["kind"] == "memory_dropped" else None) for e in entries}
        self._copied: dict[int, ShardCopied] = {}
        self._began = 0.0
        self._noted: tuple[int, float] = (0, 0.0)

    @property
    def copied_step(self) -> int | None:
        """The newest step of which all shards have copies on other nodes."""
        return self._replication.replicated[1] or None

    # ------------------------------------------------------------ sets and copies

    def complete(self, memory: MemorySet) -> None:
        """All ranks have this set in memory now, and nothing speaks against it."""
        if self._enabled:
            nodes = {keeper.keeper for keeper in self._keepers.all() if keeper.port}
            self._carry_out(self._replication.complete((memory.generation, memory.step), memory.where, nodes))

    def copied(self, event: ShardCopied) -> None:
        key = (event.generation, event.step)
        if event.error is None:
            self._copied[event.rank] = event
            self._carry_out(self._replication.copied(event.rank, key))
            return
        if self._replication.wanted and self._may_note(event.generation):
            self._ledger.append(
                "copy_failed", generation=event.generation, step=event.step, rank=event.rank, error=event.error
            )
        self._carry_out(self._replication.failed(key))

    def release(self, order: ReleaseOrder) -> None:
        """Tell keepers what may be used again; what is needed for copies only if that cannot be helped."""
        spare = tuple(sorted(step for generation, step in self._replication.wanted if generation == order.generation))
        self._released[order.generation] = order
        for old in [old for old in self._released if old < order.generation - 1 and old != order.generation]:
            del self._released[old]
        self._keepers.post_all(replace(order, spare=tuple(step for step in spare if step not in order.keep)))

    def drop(self, generation: int, step: int | None = None) -> None:
        """This set, or all of that generation, is not to be restored."""
        self._spoilt.add((generation, step))
        self._replication.drop(generation, step)

    # ------------------------------------------------------------ generations and keepers

    def generation_started(self, records: Sequence[GenerationRecord]) -> None:
        self._records = tuple(records)
        self._holdings = {}
        current = max(records, key=lambda record: record.number)
        self._replication.generation_started((current.parent_generation or 0, current.restored_step))

    def generation_ending(self) -> None:
        """Its ranks are gone: keepers say now what they hold."""
        self._holdings = {}
        self._replication.generation_ended()

    def holds(self, keeper: str, held: Sequence[HeldSnapshot]) -> None:
        """All that this keeper has, since no rank of the generation that ended changes it any more."""
        self._holdings[keeper] = list(held)

    def snapshotted(self, keeper: str, held: HeldSnapshot) -> None:
        """One more, which was digested late."""
        if keeper in self._holdings:
            self._holdings[keeper].append(held)

    def keeper_lost(self, keeper: str) -> None:
        self._holdings.pop(keeper, None)
        self._carry_out(self._replication.keeper_lost(keeper))

    def rebuild(self, records: Sequence[GenerationRecord], keepers: Sequence[KeeperJoined]) -> None:
        """After the coordinator's restart: what is copied, by the word of the keepers."""
        held = {keeper.keeper: (*keeper.snapshots, *keeper.copies) for keeper in keepers}
        self._holdings = {keeper: list(snapshots) for keeper, snapshots in held.items()}
        worlds = {record.number: record.world_size for record in records}
        usable = (key for key in holdings.copied_twice(worlds, held) if self._usable(key, records))
        self._replication = Replication(replicated=next(iter(usable), (0, 0)))

    # ------------------------------------------------------------ what can be restored

    def restorable(self, world_size: int) -> MemorySet | None:
        """The newest set of which each rank's shard is in the memory of some keeper that has said so."""
        keys = {(one.generation, one.step) for held in self._holdings.values() for one in held}
        worlds = {record.number: record.world_size for record in self._records}
        for key in sorted(keys, reverse=True):
            if worlds.get(key[0]) != world_size or not self._usable(key, self._records):
                continue
            found = self.located(*key, world_size)
            if found is not None and not self._differ(key) and not self._is_mixed(found):
                return found
        return None

    def silent(self) -> bool:
        """Whether some keeper has not said yet what it holds."""
        return any(keeper.keeper not in self._holdings for keeper in self._keepers.all())

    def located(self, generation: int, step: int, world_size: int) -> MemorySet | None:
        """Where the shards of this set are, if each is somewhere."""
        where = holdings.places((generation, step), world_size, self._holdings, self._keepers.held_at(generation))
        return MemorySet(generation=generation, step=step, where=where) if where is not None else None

    def digests(self, memory: MemorySet) -> dict[int, str]:
        """Of the shards of that set, by rank."""
        key = (memory.generation, memory.step)
        return {
            one.rank: one.digest
            for keeper in set(memory.where.values())
            for one in self._holdings.get(keeper, [])
            if (one.generation, one.step) == key and memory.where[one.rank] == keeper
        }

    def from_copies(self, memory: MemorySet) -> list[int]:
        """The ranks whose own keepers do not have their shards any more."""
        own = self._keepers.places(memory.generation)
        return [r for r, keeper in sorted(memory.where.items()) if r in own and self._keepers.at(own[r]) != keeper]

    def restore_order(self, record: GenerationRecord, memory: MemorySet | None) -> RestoreOrder | None:
        """What the ranks of that generation are told; `memory`: the set that it restores, if this coordinator knows."""
        if record.parent_generation is None:
            return None
        generation, step, source = record.parent_generation, record.restored_step, record.source
        if source != "memory":
            return RestoreOrder(source="checkpoint", generation=generation, step=step, checkpoint=record.parent)
        memory = memory or self.located(generation, step, record.world_size)
        places = self.addresses(memory) if memory is not None else ()
        return RestoreOrder(source="memory", generation=generation, step=step, checkpoint=record.parent, places=places)

    def addresses(self, memory: MemorySet) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """Where ranks find its shards, as RestoreOrder.places has it."""
        keepers = {keeper.keeper: keeper for keeper in self._keepers.all()}
        found = {
            name: tuple(sorted(rank for rank, at in memory.where.items() if at == name))
            for name in sorted(set(memory.where.values()))
        }
        return tuple(
            (keepers[name].host, keepers[name].port, ranks) for name, ranks in found.items() if name in keepers
        )

    def _usable(self, key: Key, records: Sequence[GenerationRecord]) -> bool:
        limits = {link.generation: link.step_max for link in chain(records)}
        generation, step = key
        step_max = limits.get(generation)
        on_lineage = generation in limits and (step_max is None or step <= step_max)
        return on_lineage and not {(generation, None), (generation, step)} & self._spoilt

    def _is_mixed(self, memory: MemorySet) -> bool:
        """Whether it is of two saves of one step: some ranks were killed before they had saved it again, as finished.
        Those that did would end at once, and the others train on without them."""
        keys = {(rank, keeper) for rank, keeper in memory.where.items()}
        finished = {
            one.finished
            for keeper, held in self._holdings.items()
            for one in held
            if (one.rank, keeper) in keys and (one.generation, one.step) == (memory.generation, memory.step)
        }
        return len(finished) > 1

    def _differ(self, key: Key) -> bool:
        said = {
            one.rank: one.replicas
            for held in self._holdings.values()
            for one in held
            if (one.generation, one.step) == key
        }
        return bool(differences(said))

    # ------------------------------------------------------------ decisions

    def _carry_out(self, decisions: Sequence[Copy | Keep]) -> None:
        keepers = {keeper.keeper: keeper for keeper in self._keepers.all()}
        for decision in decisions:
            match decision:
                case Copy():
                    self._began = self._clock()
                    self._copied = {}
                    to = keepers[decision.to]
                    self._keepers.post(
                        decision.node,
                        CopyOrder(
                            ranks=decision.ranks,
                            generation=decision.key[0],
                            step=decision.key[1],
                            host=to.host,
                            port=to.port,
                            keep_generation=decision.keep[0],
                            keep_step=decision.keep[1],
                        ),
                    )
                case Keep():
                    self._note(decision)
                    self._keepers.post_all(DropCopies(generation=decision.key[0], step=decision.key[1]))
                    for order in self._released.values():
                        self.release(order)

    def _note(self, kept: Keep) -> None:
        generation, step = kept.key
        if kept.ranks and self._may_note(generation):
            self._ledger.append(
                "replicated",
                generation=generation,
                step=step,
                bytes=sum(copied.bytes for copied in self._copied.values()),
                seconds=self._clock() - self._began,
            )

    def _may_note(self, generation: int) -> bool:
        """The first time in a generation, and now and then."""
        now = self._clock()
        if self._noted[0] == generation and now - self._noted[1] < _LEDGER_SECONDS:
            return False
        self._noted = (generation, now)
        return True
