"""Copies a captured state into a slot: at the boundary what may change at any time, the rest beside the next step.

What only a step of a tracked optimizer changes is copied on a thread of its own while the loop computes; torch's global
hook holds every optimizer step back until that is done, also those within a backward pass.

Invariants: all bytes in a complete slot are of the boundary. A steady tensor that something else changed meanwhile
(its version or its address is another one) discards the snapshot, and is copied at the boundary from then on. Not
noticed is a write that bypasses torch's version counter (`parameter.data.mul_(...)`, NumPy views of a parameter) after
the loop was given its next batch and before the optimizer's step.

Signs of life come from the loop's thread alone: while it waits for a copy, as long as that advances.
"""

import threading
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from workers.checkpoint.document import to_bytes
from workers.checkpoint.image import ImageLayout
from workers.checkpoint.slots import Slot, SlotState
from workers.checkpoint.tensors import CapturedState
from workers.streams import CopyStream, Mark

_GROUP_BYTES_MAX = 8 << 20
_GROUP_TENSORS_MAX = 256
_GROUPS_MIN = 8
_POLL_SECONDS = 0.1
_VERSION = attrgetter("_version")

_Look = tuple[list[int], list[int], list[int]]

BeforeGroup = Callable[[int, int], None]
"""Called before each group of tensors with how many were copied, and how many there are."""


class Copy:
    """One snapshot on its way into its slot.

    `began_at`, `copied_at`: monotonic. `changed`: names of steady tensors that were changed before all were copied; the
    slot is free again then. `copied`: how many tensors were.
    """

    def __init__(self, slot: Slot, began_at: float) -> None:
        self.slot = slot
        self.began_at = began_at
        self.copied_at = 0.0
        self.copied = 0
        self.changed: list[str] = []
        self.error: BaseException | None = None
        self.asked_for = threading.Event()
        self.finished = threading.Event()
        self._stall: tuple[float, float | None] = (0.0, began_at)
        self._watched: list[_Watched] = []
        self._mark: Mark | None = None
        self._lock = threading.Lock()

    def watch(self, tensors: "list[_Watched]") -> None:
        for each in tensors:
            each.begin()
        self._watched = tensors

    @property
    def stall_seconds(self) -> float:
        """How long the loop has stood still for it, until now."""
        seconds, since = self._stall
        return seconds if since is None else seconds + time.monotonic() - since

    def loop_stands(self) -> None:
        self._stall = (self._stall[0], time.monotonic())

    def loop_goes_on(self) -> float:
        """Returns for how long it stood."""
        before = self._stall[0]
        self._stall = (self.stall_seconds, None)
        return self._stall[0] - before

    def let_change(self) -> None:
        """All is asked for: the calling thread may go on to change the tensors once this returns."""
        self._verify()
        if self._mark is not None:
            self._mark.hold()

    def await_copies(self, mark: Mark) -> None:
        self._mark = mark
        self.asked_for.set()
        mark.wait()
        self._verify()
        self.copied_at = time.monotonic()

    def _verify(self) -> None:
        with self._lock:
            self.changed += [name for each in self._watched for name in each.changed()]
            self._watched = []  # from here on they may change


class _Watched:
    """Tensors by name, as they are stored and as training has them, and what shows that they were changed.

    A sharded tensor counts its changes itself, the part of it that is stored does not.
    """

    def __init__(self, stored: dict[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
        self._names = list(stored)
        self._stored = list(stored.values())
        self._live = [live[name] for name in stored]
        self._before: _Look = ([], [], [])

    def begin(self) -> None:
        self._before = self._look()

    def changed(self) -> list[str]:
        now = self._look()
        if now == self._before:
            return []
        pairs = zip(self._names, zip(*self._before, strict=True), zip(*now, strict=True), strict=True)
        return [name for name, before, after in pairs if before != after]

    def _look(self) -> "_Look":
        versions = [*map(_VERSION, self._stored)], [*map(_VERSION, self._live)]
        return (*versions, [*map(torch.Tensor.data_ptr, self._stored)])


class Copier:
    """Fills slots, one at a time. `alive` gives a sign of life of the loop's thread."""

    def __init__(self, stream: CopyStream, alive: Callable[[], None]) -> None:
        self._stream = stream
        self._alive = alive
        self._copy: Copy | None = None
        self._plan: _Plan | None = None
        self._targets: dict[Slot, tuple[_Plan, int, list[list[torch.Tensor]]]] = {}
        self._unsteady: frozenset[str] = frozenset()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hook: RemovableHandle | None = None
        self._waited_seconds = 0.0

    def begin(
        self,
        layout: ImageLayout,
        captured: CapturedState,
        document: bytes,
        slot: Slot,
        *,
        began_at: float,
        beside: bool,
        before_group: BeforeGroup,
        done: Callable[[Copy], None],
    ) -> None:
        """Copy a state into a slot that is being written; when this returns, the loop may go on.

        `document` is the state's, with room for the digests. `beside`: steady tensors are copied while it does.
        `done` is called, on whichever thread, once the slot is complete, or free again.
        """
        assert self._copy is None, "the last copy is not settled"
        plan = self._planned(layout, captured)
        data_start = layout.data_start(document)
        targets = self._targets_in(slot, plan, data_start)
        sources = plan.sources(captured)
        copy = Copy(slot, began_at)
        digests = captured.digests

        def copy_groups(first: int, stop: int, alive: Callable[[], None] | None) -> None:
            for index in range(first, stop):
                if alive is not None:
                    alive()
                before_group(copy.copied, plan.total)
                self._stream.copy(targets[index], sources[index])
                copy.copied += len(sources[index])

        def finish(alive: Callable[[], None] | None = None) -> None:
            try:
                copy_groups(plan.steady_from, len(targets), alive)
                content = document
                if digests is not None:
                    with self._stream.active():
                        digests.take(plan.is_late)
                    content = to_bytes(captured.whole_document())
                copy.await_copies(self._stream.mark())
                if copy.changed:
                    slot.release()
                else:
                    slot.complete(layout.write_header(slot.image, content, data_start))
                done(copy)
            except BaseException as error:
                copy.error = error
                if slot.state is SlotState.WRITING:
                    slot.release()
            finally:
                copy.asked_for.set()
                copy.finished.set()

        try:
            self._stream.follow()
            if digests is not None:
                with self._stream.active():
                    digests.take(lambda name: not plan.is_late(name))
            copy_groups(0, plan.steady_from, self._alive)
            self._stream.mark().hold()
            watched = plan.watched(captured) if beside else []
            copy.watch(watched)
        except BaseException:
            slot.release()
            raise
        self._copy = copy
        if watched:
            self._on_thread(finish)
        else:
            finish(self._alive)
            if copy.error is not None:
                self.settle()
        copy.loop_goes_on()

    def settle(self) -> Copy | None:
        """Wait until what was begun is done, and return it; None if nothing was. Raises what went wrong with it."""
        copy = self._copy
        if copy is None:
            return None
        self._wait(copy, copy.finished)
        self._copy = None
        if copy.changed:
            self._unsteady |= set(copy.changed)
        if copy.error is not None:
            raise copy.error
        return copy

    def take_waited_seconds(self) -> float:
        """For how long the loop has waited since the last call, beyond `begin`."""
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds

    def forget(self, slot: Slot) -> None:
        """The slot is about to be closed."""
        if self._targets.pop(slot, None) is not None:
            self._stream.unpin(slot)

    def close(self) -> None:
        """End the thread, and let optimizers step unasked."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _wait(self, copy: Copy, event: threading.Event) -> None:
        if event.is_set():
            return
        copy.loop_stands()
        copied = copy.copied
        while not event.wait(_POLL_SECONDS):
            if copy.copied != copied:
                copied = copy.copied
                self._alive()
        self._waited_seconds += copy.loop_goes_on()

    def _before_step(self, *_: Any) -> None:
        copy = self._copy
        if copy is not None and not copy.finished.is_set():
            self._wait(copy, copy.asked_for)
            copy.let_change()

    def _on_thread(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            self._thread = threading.Thread(target=self._work, name="lastgood-copy", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds on to the state's tensors

    def _planned(self, layout: ImageLayout, captured: CapturedState) -> "_Plan":
        if self._plan is None or not self._plan.holds(layout, captured.steady, self._unsteady):
            self._plan = _Plan(layout, captured, self._unsteady)
        return self._plan

    def _targets_in(self, slot: Slot, plan: "_Plan", data_start: int) -> list[list[torch.Tensor]]:
        known = self._targets.get(slot)
        if known is None:
            self._stream.pin(slot)
        if known is None or known[0] is not plan or known[1] != data_start:
            flat = plan.layout.targets(slot.image, data_start)
            known = plan, data_start, [[flat[at] for at in group] for group in plan.groups]
            self._targets[slot] = known
        return known[2]


class _Plan:
    """In which groups the tensors of a layout are copied: what is not steady first.

    `groups`: places in the layout's order; those from `steady_from` on are steady. `total`: tensors with any bytes.
    """

    def __init__(self, layout: ImageLayout, captured: CapturedState, unsteady: frozenset[str]) -> None:
        self.layout = layout
        self._steady, self._unsteady = captured.steady, unsteady
        self._late = captured.steady.keys() - unsteady
        in_order = [captured.tensors[at] for at in layout.order]
        self.total = len(in_order)
        late = [at for at, named in enumerate(in_order) if named.name in self._late]
        early = [at for at, named in enumerate(in_order) if named.name not in self._late]
        sizes = [named.tensor.nbytes for named in in_order]
        tensors_max = max(1, min(_GROUP_TENSORS_MAX, -(-self.total // _GROUPS_MIN)))
        self._early_groups = _grouped(early, sizes, tensors_max)
        late_groups = _grouped(late, sizes, tensors_max)
        self.groups = self._early_groups + late_groups
        self.steady_from = len(self._early_groups)
        # These stay the same objects for as long as `steady` does.
        self._late_sources = [[in_order[at].tensor for at in group] for group in late_groups]
        self._stored = {in_order[at].name: in_order[at].tensor for at in late}
        self._watched = _Watched(self._stored, captured.steady)

    def holds(self, layout: ImageLayout, steady: Mapping[str, torch.Tensor], unsteady: frozenset[str]) -> bool:
        return layout is self.layout and steady is self._steady and unsteady is self._unsteady

    def is_late(self, name: str) -> bool:
        """Whether a tensor of this name may be read beside the next step."""
        return name in self._late

    def sources(self, captured: CapturedState) -> list[list[torch.Tensor]]:
        """What is to be copied, in groups."""
        tensors, order = captured.tensors, self.layout.order
        return [[tensors[order[at]].tensor for at in group] for group in self._early_groups] + self._late_sources

    def watched(self, captured: CapturedState) -> list[_Watched]:
        """All that is read beside the next step; none if nothing is."""
        found = [self._watched] if self._stored else []
        if captured.digests is not None:
            read = {each.name: each.tensor for each in captured.digests.tensors(self.is_late)}
            if others := {name: tensor for name, tensor in read.items() if name not in self._stored}:
                found.append(_Watched(others, captured.steady))
        return found


def _grouped(places: list[int], sizes: list[int], tensors_max: int) -> list[list[int]]:
    groups: list[list[int]] = []
    group_bytes = 0
    for at in places:
        if not groups or len(groups[-1]) >= tensors_max or group_bytes + sizes[at] > _GROUP_BYTES_MAX:
            groups.append([])
            group_bytes = 0
        groups[-1].append(at)
        group_bytes += sizes[at]
    return groups
