"""Every fault point: where it lies, in which process, and what may be made to go wrong there.

A point comes right before what its line names, unless it says otherwise; the one after a step is the one before the
next. SIGKILL is possible everywhere. An error of the storage is possible where storage is about to be asked, and a torn
write where something is about to be written. A test holds this list to the calls of `failpoint.hit` in the source.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Process = Literal["rank", "keeper", "coordinator"]


class Fault(StrEnum):
    """What is injected. TORN: half of the data is written, then the process is killed."""

    KILL = "SIGKILL"
    ENOSPC = "ENOSPC"
    EIO = "EIO"
    TORN = "torn write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`process`: the one that passes it. `faults`: what can happen there."""

    name: str
    process: Process
    what: str
    faults: tuple[Fault, ...]

    @property
    def area(self) -> str:
        """The part of the protocol: the name's first half."""
        return self.name.partition(".")[0]


_KILL = (Fault.KILL,)
_READ = (Fault.KILL, Fault.EIO)
_CHANGE = (Fault.KILL, Fault.ENOSPC, Fault.EIO)
_WRITE = (Fault.KILL, Fault.ENOSPC, Fault.EIO, Fault.TORN)

_TABLE: tuple[tuple[Process, str, str, tuple[Fault, ...]], ...] = (
    # A generation begins.
    ("coordinator", "generation.judge", "the failure that ended a generation is written down and judged", _KILL),
    ("coordinator", "restore.choose", "the run directory is scanned for what to restore", _READ),
    ("coordinator", "quarantine.open", "the temporary file of a quarantine record is created", _CHANGE),
    ("coordinator", "quarantine.write", "a quarantine record is written", _WRITE),
    ("coordinator", "quarantine.fsync", "a quarantine record is fsynced", _CHANGE),
    ("coordinator", "quarantine.link", "a quarantine record gets its name", _CHANGE),
    ("coordinator", "quarantine.dir_fsync", "the directory of quarantine records is fsynced", _CHANGE),
    ("coordinator", "generation.create", "the fence is looked at, before a generation's file is made", _CHANGE),
    ("coordinator", "generation.open", "the temporary file of a generation is created", _CHANGE),
    ("coordinator", "generation.write", "a generation's file is written", _WRITE),
    ("coordinator", "generation.fsync", "a generation's file is fsynced", _CHANGE),
    ("coordinator", "generation.link", "a generation's file gets its name, which only one driver can do", _CHANGE),
    ("coordinator", "generation.dir_fsync", "the directory of generations is fsynced", _CHANGE),
    ("coordinator", "generation.created", "the lineage is looked at again, after the file is in place", _READ),
    ("coordinator", "generation.start", "the ranks of a generation are told to start", _KILL),
    ("rank", "rendezvous.init", "a rank joins the store of its generation", _KILL),
    ("rank", "rendezvous.group", "the process group is set up", _KILL),
    ("rank", "rendezvous.done", "the process group is there", _KILL),
    ("rank", "restore.begin", "a rank opens what it restores", _READ),
    ("rank", "restore.opened", "its document is read and its identity compared; tensors come next", _READ),
    ("rank", "restore.read", "a block of a shard is read, from storage or from memory", _READ),
    ("rank", "restore.apply", "all is in place; the certificate comes next", _KILL),
    ("rank", "restore.done", "training goes on", _KILL),
    # A step.
    ("rank", "step.end", "a step's boundary begins: optimizer and scheduler have stepped", _KILL),
    ("rank", "step.begin", "a step's boundary is over, and the next step begins", _KILL),
    ("coordinator", "cadence.decide", "a new interval between saves is written down and ordered", _KILL),
    # A snapshot.
    ("rank", "snapshot.begin", "a snapshot is taken, before it has a slot", _KILL),
    ("rank", "snapshot.copy", "a group of tensors is copied into the slot", _KILL),
    ("rank", "snapshot.complete", "the slot is complete, and the keeper is told", _KILL),
    ("rank", "snapshot.told", "the keeper was told of the slot", _KILL),
    ("keeper", "snapshot.received", "the keeper takes a slot that a rank told of", _KILL),
    ("keeper", "snapshot.digested", "the slot is digested, and the coordinator is told", _KILL),
    ("coordinator", "snapshot.known", "the coordinator hears of a rank's snapshot", _KILL),
    # A shard is written and verified.
    ("keeper", "persist.begin", "an ordered shard is begun", _READ),
    ("keeper", "persist.make_dir", "the directory of the attempt is made", _CHANGE),
    ("keeper", "persist.create", "the shard's temporary file is created", _CHANGE),
    ("keeper", "persist.block", "a block of the shard is written", _WRITE),
    ("keeper", "persist.truncate", "the file gets its exact length", _CHANGE),
    ("keeper", "persist.fsync", "the shard is fsynced", _CHANGE),
    ("keeper", "persist.rename", "the shard gets its name", _CHANGE),
    ("keeper", "persist.dir_fsync", "the attempt's directory is fsynced", _CHANGE),
    ("keeper", "persist.readback", "the shard is read back and compared", _READ),
    ("keeper", "persist.receipt", "the receipt is made out", _KILL),
    ("keeper", "persist.tell", "the receipt, or the failure, is sent", _KILL),
    ("keeper", "persist.told", "the receipt, or the failure, was sent", _KILL),
    # A commit.
    ("coordinator", "receipt.known", "the coordinator hears of a receipt", _KILL),
    ("coordinator", "commit.begin", "the fence and the shards are looked at, before a manifest is written", _READ),
    ("coordinator", "commit.open", "the manifest's temporary file is created", _CHANGE),
    ("coordinator", "commit.write", "the manifest is written", _WRITE),
    ("coordinator", "commit.fsync", "the manifest is fsynced", _CHANGE),
    ("coordinator", "commit.rename", "the manifest gets its name: from here on the checkpoint counts", _CHANGE),
    ("coordinator", "commit.dir_fsync", "the checkpoint's directory is fsynced", _CHANGE),
    ("coordinator", "commit.parent_fsync", "the directory of checkpoints is fsynced", _CHANGE),
    ("coordinator", "commit.done", "the manifest is in place; the ledger comes next", _KILL),
    ("coordinator", "commit.recorded", "the ledger has the commit; the commit machine comes next", _KILL),
    ("coordinator", "commit.told", "the ranks were told of the commit", _KILL),
    # Records and leftovers.
    ("coordinator", "ledger.append", "an event is appended to the ledger", _WRITE),
    ("coordinator", "ledger.appended", "an event was appended to the ledger", _KILL),
    ("coordinator", "retention.trash", "a checkpoint is moved out of sight", _CHANGE),
    ("coordinator", "retention.check", "generations are read again, with the checkpoint out of sight", _READ),
    ("coordinator", "retention.unlink", "the checkpoint's files are deleted", _CHANGE),
    ("coordinator", "retention.done", "the checkpoint is gone", _KILL),
    # The end.
    ("rank", "finish.begin", "the loop has returned; the last step is saved next", _KILL),
    ("rank", "finish.done", "the last step is committed, and the rank says that it has finished", _KILL),
)

POINTS: tuple[Point, ...] = tuple(
    Point(name=name, process=process, what=what, faults=faults) for process, name, what, faults in _TABLE
)
"""In the order in which a run passes them for the first time, or nearly."""


def point_named(name: str) -> Point:
    """KeyError if there is none."""
    return next((point for point in POINTS if point.name == name), None) or _unknown(name)


def _unknown(name: str) -> Point:
    raise KeyError(f"{name!r} is no fault point; `lastgood chaos points` lists them")
