"""Deleting: what retention no longer needs after a commit, what a failed save left, and more when the disk is full.

The decisions are in decide/retention.py, the disk in archive.py. Invariants: one deletes at a time; trouble with
deleting never stops a run, for the next commit tries again; what is being written or restored is never touched, nor
is the newest verified checkpoint on the lineage, however full the disk.
"""

import logging
import threading
from collections.abc import Callable, Collection

from orchestrator.archive import RunArchive
from orchestrator.decide import retention
from orchestrator.observe.ledger import Ledger

logger = logging.getLogger("lastgood")


class Housekeeping:
    """Methods block, and are for threads. `protected()` gives the names that are written or restored now.

    keep_last: how many checkpoints stay; keep_last_min: how many stay also on a full disk.
    committed: names of all that are committed and not deleted; shared with the caller.
    """

    def __init__(
        self,
        *,
        archive: RunArchive,
        ledger: Ledger,
        keep_last: int,
        keep_last_min: int,
        committed: set[str],
        protected: Callable[[], Collection[str]],
    ) -> None:
        self._archive = archive
        self._ledger = ledger
        self._keep_last = keep_last
        self._keep_last_min = keep_last_min
        self._committed = committed
        self._protected = protected
        self._one_at_a_time = threading.Lock()

    def clean_up(self, my_generation: int) -> int | None:
        """After a commit. Returns how many bytes are free then, None if the storage does not say."""
        with self._one_at_a_time:
            try:
                self._delete_expired(my_generation, self._keep_last, lambda: True)
                return self._archive.free_bytes()
            except OSError as error:
                logger.warning("lastgood: what is no longer needed could not be deleted yet: %s", error)
                return None

    def discard(self, attempt: str, my_generation: int) -> None:
        """Delete what a failed attempt left: on a full disk it would be in the way of the next one."""
        with self._one_at_a_time:
            try:
                if attempt not in self._committed and self._archive.is_orphan(attempt):
                    self._delete(attempt, "its save failed", my_generation)
            except OSError as error:
                logger.warning("lastgood: the remains of %s could not be deleted yet: %s", attempt, error)

    def make_room(self, wanted_bytes: int, my_generation: int) -> None:
        """On a full disk: delete leftovers, then the oldest checkpoints down to keep_last_min, until this much is free.

        At least one goes, if one may: a quota may be full while the file system is not.
        """
        with self._one_at_a_time:
            deleted = False

            def wanted() -> bool:
                nonlocal deleted
                more = not deleted or self._archive.free_bytes() < wanted_bytes
                deleted = True
                return more

            try:
                self._delete_expired(my_generation, self._keep_last_min, wanted, why=", and the disk is full")
            except OSError as error:
                logger.warning("lastgood: no room could be made: %s", error)

    def _delete_expired(self, my_generation: int, keep_last: int, wanted: Callable[[], bool], *, why: str = "") -> None:
        if not self._archive.empty_trash(my_generation=my_generation):
            return
        # By the ledger's word a checkpoint whose manifest is gone is damaged, and no orphan that may be deleted.
        scan = self._archive.scan(frozenset(self._committed), manifests=False)
        for delete in retention.expired(
            generations=scan.generations,
            checkpoints=scan.checkpoints,
            orphans=scan.orphans,
            rejected=scan.rejected,
            protected=self._protected(),
            my_generation=my_generation,
            keep_last=keep_last,
        ):
            if not wanted() or not self._delete(delete.name, delete.reason + why, my_generation):
                return

    def _delete(self, name: str, reason: str, my_generation: int) -> bool:
        if not self._archive.delete(name, my_generation=my_generation):
            return False
        self._committed.discard(name)
        self._ledger.append("deleted", checkpoint=name, reason=reason)
        return True
