"""What a keeper hands to a rank that restores from memory: the slots that are here, and what lies with other keepers.

    rank -> keeper   fetch: generation, step, world_size, places
    keeper -> rank   shard (with a slot), for each that is here; remote (with a record), for each that is elsewhere;
                     handed_out, with the problem if some shard cannot be had
    rank -> keeper   part: rank, start, stop        of a shard that is elsewhere, again and again
    keeper -> rank   part (with these bytes), or with the problem

Faults survived: another keeper that is gone, or has lost the shard: the rank is told.
"""

import os
from collections.abc import Collection
from typing import Any

from workers.checkpoint.slots import Slot
from workers.errors import EnvironmentProblem
from workers.replication.exchange import Exchange
from workers.replication.remote import RemoteSet
from workers.wire import Channel


class HandingOut:
    """For one connection of a rank."""

    def __init__(self, channel: Channel, exchange: Exchange) -> None:
        self._channel = channel
        self._exchange = exchange
        self._remote: RemoteSet | None = None

    def shard(self, rank: int, slot: Slot) -> None:
        """One that is here."""
        self._channel.send("shard", fds=(slot.fd,), rank=rank, bytes=slot.image_bytes, digest=slot.digest)

    def others(self, message: dict[str, Any], own: Collection[int]) -> None:
        """All but those of the ranks in `own`, which were handed out."""
        generation, step = message["generation"], message["step"]
        here = set(own)
        for key in self._exchange.copies.held():
            slot = self._exchange.copies.open(key) if key.set == (generation, step) and key.rank not in here else None
            if slot is not None:
                self.shard(key.rank, slot)
                slot.close()
                here.add(key.rank)
        self.close()
        self._remote = self._exchange.elsewhere(generation, step, message["places"], here)
        try:
            for rank in self._remote.ranks:
                self._send_and_close("remote", self._remote.describe(rank, message["world_size"]), rank=rank)
        except (OSError, EnvironmentProblem) as error:
            self._channel.send("handed_out", problem=_short(error))
            return
        self._channel.send("handed_out", problem="")

    def part(self, message: dict[str, Any]) -> None:
        try:
            if self._remote is None:
                raise OSError("no set is being handed out")
            fd = self._remote.read(message["rank"], message["start"], message["stop"])
        except (OSError, EnvironmentProblem) as error:
            self._channel.send("part", problem=_short(error))
            return
        self._send_and_close("part", fd, problem="")

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def _send_and_close(self, kind: str, fd: int, **fields: Any) -> None:
        try:
            self._channel.send(kind, fds=(fd,), **fields)
        finally:
            os.close(fd)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
