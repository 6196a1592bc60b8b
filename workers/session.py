"""What the user's loop sees: track what has to survive, restore it, mark the end of each step.

Invariants: a save holds exactly the state at a step boundary (after optimizer and scheduler stepped, gradients
cleared); it is taken when the loop asks for the next batch, or returns, so that what the loop's body does after the
boundary (a break, a validation) is never skipped by a restore; all ranks decide on saves from the step alone, so no
collective is needed and none can hang; a batch counts as consumed when it was handed to the loop; an error in saving
never ends training unless the user asked to wait for that save.
"""

import errno
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from workers import failpoint
from workers.bad_step import end_rank, judge
from workers.checkpoint.place import open_store
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.tensors import CapturedState
from workers.data.loader import ShardedLoader
from workers.errors import CallerError, CheckpointDamaged
from workers.heartbeat import HeartbeatPage
from workers.loss_guard import LossGuard
from workers.messages import RestoreOrder
from workers.orders import RankOrders
from workers.sample_notes import SampleNotes
from workers.saving import Saver
from workers.state.certificate import rebased
from workers.state.identity import Identity, capture_identity, check_identity, compare
from workers.state.replicas import turn_of
from workers.state.training import Progress, TrainingState
from workers.wire import Channel

logger = logging.getLogger("lastgood")

_PHASE_SECONDS_MAX = 1e7  # months

# What a device or a missing file says of one checkpoint; other errors (permissions, a lost mount) speak of the storage.
_DAMAGE_ERRORS = {errno.EIO, errno.ENOENT, errno.EUCLEAN}

_current: "Session | None" = None


def current_session() -> "Session":
    if _current is None:
        raise CallerError(
            "workers.get_session() was called outside a supervised loop; pass the loop to SupervisedTrainer"
        )
    return _current


@contextmanager
def run_as_current(session: "Session") -> Iterator[None]:
    global _current
    _current = session
    try:
        yield
    finally:
        _current = None
        session._saver.close()  # if the loop has failed, what is being copied may be the newest state there is


class Session:
    """One rank's side of a supervised run, for one generation."""

    def __init__(
        self, orders: RankOrders, *, agent: Channel, page: HeartbeatPage, device: torch.device, config: Any
    ) -> None:
        self._orders = orders
        self._agent = agent
        self._page = page
        self._device = device
        self._config = config
        self._guard = LossGuard(orders.loss_spike_factor)
        self._state = TrainingState(orders.rank, orders.world_size, own={"loss_guard": self._guard})
        self._progress = Progress(step=0, epoch=0, samples=0, tokens=0, training_seconds=0.0)
        self._tracked = False
        self._restored = False
        self._in_accumulation = False
        self._save_due = False
        self._snapshot_due = False
        self._saver = Saver(orders, agent=agent, page=page, device=device)
        self._store = open_store(orders.run_dir, orders.checkpoint_storage)
        self._loader: ShardedLoader | None = None
        self._notes: SampleNotes | None = None
        self._identity: Identity | None = None
        self._metrics: dict[str, Any] = {}
        self._step_started = time.monotonic()
        self._first_step_told = False

    # ------------------------------------------------------------ what the run is

    @property
    def rank(self) -> int:
        return self._orders.rank

    @property
    def local_rank(self) -> int:
        return self._orders.local_rank

    @property
    def world_size(self) -> int:
        return self._orders.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank trains: its GPU if Ray gave it one, else the CPU."""
        return self._device

    @property
    def generation(self) -> int:
        return self._orders.generation

    @property
    def step(self) -> int:
        """Steps finished, over all generations."""
        return self._progress.step

    @property
    def progress(self) -> Progress:
        return self._progress

    # ------------------------------------------------------------ before training

    def data_loader(self, dataset: Any, *, global_batch_size: int, seed: int = 0, **options: Any) -> ShardedLoader:
        """A resumable loader of this rank's slices of each global batch; see ShardedLoader for the options."""
        return ShardedLoader(
            dataset,
            global_batch_size=global_batch_size,
            seed=seed,
            rank=self.rank,
            world_size=self.world_size,
            **options,
        )

    def track(self, **objects: Any) -> None:
        """Name everything whose loss would make the resumed run differ.

        `model`, `optimizer`, `scheduler` (None if there is none), `scaler`, `data`, and any other object that has
        state_dict and load_state_dict. Raises CallerError, naming the key, for what cannot be stored or resumed.
        """
        if self._restored:
            raise CallerError("session.track() was called after session.restore(); track everything first")
        self._state.track(**objects)
        self._tracked = True
        data = objects.get("data")
        if isinstance(data, ShardedLoader):
            self._loader = data
            data.between_batches = self._between_batches
            if self._orders.record_samples:
                self._notes = SampleNotes(self._orders, data)

    def restore(self, allow: Iterable[str] = ()) -> bool:
        """Continue from the checkpoint or the snapshots that the coordinator chose; False on a fresh start.

        `allow` names identity fields that may differ from the saved run, e.g. "config.steps". Raises CallerError if the
        configuration or the data changed otherwise, CheckpointDamaged if the bytes are not the saved ones, and
        ResumeMismatch if the restored state would not continue the saved run.
        """
        if not self._tracked:
            raise CallerError("session.restore() was called before session.track(); there is nothing to restore into")
        if self._orders.skips_bad_batches and self._loader is None:
            raise CallerError(
                "RecoveryConfig.on_bad_loss is 'rollback', and the tracked data is no loader of session.data_loader(), "
                'so that there would be no batches to skip; use such a loader, or on_bad_loss="stop"'
            )
        self._page.beat(phase="restoring")
        started = time.monotonic()
        self._identity = capture_identity(
            config=self._config,
            data=self._loader,
            world_size=self.world_size,
            threads=torch.get_num_threads(),
            mesh=self._state.mesh(),
            code=self._orders.code,
        )
        self._saver.check_memory(self._state)
        order = self._orders.restore
        if order is not None:
            self._restore_from(order, tuple(allow))
        elif self._loader is not None:
            self._loader.skip_batches(self._orders.skip)
        if self._notes is not None:
            self._notes.skips()
        self._restored = True
        self._page.beat(phase="training", step=self.step)
        self._agent.send(
            "restored",
            source=order.source if order else "fresh",
            checkpoint=order.checkpoint if order and order.source == "checkpoint" else None,
            step=self.step,
            seconds=time.monotonic() - started,
        )
        self._step_started = time.monotonic()
        return order is not None

    def _restore_from(self, order: RestoreOrder, allow: tuple[str, ...]) -> None:
        context = {"rank": self.rank, "generation": self.generation, "rank_pid": os.getpid()}
        failpoint.hit("restore.begin", **context)
        identity = self._identity
        assert identity is not None
        try:
            source = self._open(order)
            document = source.document()
            for warning in check_identity(document["identity"], identity, allow=allow + self._orders.volatile):
                logger.warning("%s", warning)
            failpoint.hit("restore.opened", **context)
            self._state.apply(source)
            source.close()
        except OSError as error:
            if order.source == "memory":
                raise CheckpointDamaged(f"the snapshot of step {order.step} cannot be had: {error}") from error
            if error.errno in _DAMAGE_ERRORS:
                raise CheckpointDamaged(f"{order.checkpoint} cannot be read: {error}") from error
            raise
        self._progress = Progress.from_document(document["progress"])
        if self._progress.finished:
            self._end_if_nothing_changed(document["identity"])
        failpoint.hit("restore.apply", **context)
        saved = document["certificate"]
        if self._loader is None:
            self._state.check_certificate(saved)
        else:
            before = self._state.certificate()
            self._loader.skip_batches(self._orders.skip)
            due = rebased(saved, before, self._state.certificate())
            self._loader.before_first_batch = lambda: self._state.check_certificate(due)
        failpoint.hit("restore.done", **context)

    def _open(self, order: RestoreOrder) -> CheckpointReader:
        if order.source == "checkpoint":
            assert order.checkpoint is not None
            return CheckpointReader(self._store, order.checkpoint, self.rank, alive=self._page.beat)
        shards = self._saver.held_shards(order)
        manifest = shards.manifest(self.world_size)
        return CheckpointReader(
            self._store, manifest.name, self.rank, manifest=manifest, shards=shards, alive=self._page.beat
        )

    def _end_if_nothing_changed(self, saved_identity: dict[str, Any]) -> None:
        """The saved loop had returned: with the same configuration it would do no further step now either."""
        identity = self._identity
        assert identity is not None
        same = not any(one.field.split(".")[0] == "config" for one in compare(saved_identity, identity.document))
        if same and self._loader is not None:
            logger.info("rank %d: the run had finished at step %d", self.rank, self.step)
            self._loader.ended = True
        self._progress = replace(self._progress, finished=False)

    # ------------------------------------------------------------ training

    def end_micro_step(self) -> None:
        """A batch whose gradients are accumulated was done: no save happens until the next `end_step`."""
        self._require_tracked("end_micro_step")
        self._in_accumulation = True
        self._page.beat()

    @contextmanager
    def phase(self, name: str, *, timeout: float) -> Iterator[None]:
        """Something other than steps, such as a validation, that may take up to `timeout` seconds.

        Until then this rank is not taken to hang, nor are others that wait for it. Raises CallerError for a timeout
        that is no positive number.
        """
        if not isinstance(name, str):
            raise CallerError(f"session.phase({name!r}, ...): the name has to be a string")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _PHASE_SECONDS_MAX:
            raise CallerError(
                f"session.phase({name!r}, timeout={timeout!r}): timeout has to be a number of seconds above 0, at most "
                f"{_PHASE_SECONDS_MAX:.0f}"
            )
        began = time.monotonic()
        try:
            with self._page.declared(name, timeout):
                yield
        finally:
            self._step_started += time.monotonic() - began  # it is no part of the step

    def end_step(self, *, loss: float | None = None, grad_norm: float | None = None, tokens: int = 0) -> None:
        """The boundary of a step: optimizer and scheduler have stepped, gradients are cleared. Maybe saves.

        `loss`, `grad_norm`: this rank's, or the whole batch's. If one is bad the rank ends here, unsaved, and
        RecoveryConfig.on_bad_loss says what becomes of the run. `tokens`: how many this rank trained on in the step.
        """
        self._require_tracked("end_step")
        context = {"rank": self.rank, "step": self.step + 1, "generation": self.generation, "rank_pid": os.getpid()}
        failpoint.hit("step.end", **context)
        self._step_started += self._saver.settle()  # it is no part of the step
        self._in_accumulation = False
        values = {"loss": loss, "grad_norm": grad_norm}
        bad = judge(self._guard, values, gradients_are_scaled=self._state.scales_gradients())
        if bad is not None:
            end_rank(bad, agent=self._agent, rank=self.rank, step=self.step + 1, loader=self._loader)
        step_seconds = self._advance(tokens)
        self._page.beat(step=self.step, phase="training", loss=loss, step_seconds=step_seconds)
        if loss is not None:
            self._metrics["loss"] = loss
        if not self._first_step_told:
            self._first_step_told = True
            self._agent.send("first_step", step=self.step, at=time.time())
        self._saver.take_notices(self.step)
        every = self._saver.save_every_steps
        # Not lost when the loop takes several steps with one batch: it is saved before the next batch all the same.
        due = every is not None and self.step % every == 0
        self._save_due = self._saver.ordered(self.step) or self._save_due or due
        every = self._saver.snapshot_every_steps
        self._snapshot_due = every is not None and self.step % every == 0
        if self._loader is None:
            self._save_if_due()
        failpoint.hit("step.begin", **{**context, "step": self.step + 1})

    def _advance(self, tokens: int) -> float:
        """Count the step; returns how many seconds it took."""
        now = time.monotonic()
        step_seconds = now - self._step_started
        loader, epoch_before = self._loader, self._progress.epoch
        consumed = loader.take_consumed() if loader else []
        self._progress = Progress(
            step=self.step + 1,
            epoch=loader.epoch if loader else epoch_before,
            samples=self._progress.samples + len(consumed),
            tokens=self._progress.tokens + tokens,
            training_seconds=self._progress.training_seconds + step_seconds,
        )
        self._step_started = now
        if self._notes is not None:
            self._notes.step(self.step, consumed, epoch_before=epoch_before)
        return step_seconds

    def save_now(self, *, wait: bool = False) -> bool:
        """Save the state of the last finished step, on all ranks alike; call it right after `end_step`.

        With `wait`, it is saved now; returns once that is committed, and False if it was given up for good. Without,
        it is saved when the loop asks for its next batch.
        """
        self._require_tracked("save_now")
        if self._in_accumulation:
            raise CallerError(
                "session.save_now() was called between micro steps; call it right after session.end_step()"
            )
        self._save_due = True
        if wait:
            return self._save_and_wait()
        if self._loader is None:
            self._save_if_due()
        return True

    def _between_batches(self) -> None:
        self._page.beat()
        self._save_if_due()

    def _save_if_due(self) -> None:
        if (self._save_due or self._snapshot_due) and not self._in_accumulation:
            durable, self._save_due, self._snapshot_due = self._save_due, False, False
            self._saver.settle()
            self._saver.save(self._capture, step=self.step, durable=durable)
            self._step_started = time.monotonic()

    def _save_and_wait(self) -> bool:
        self._save_due = self._snapshot_due = False
        committed = self._saver.save_and_wait(self._capture, step=self.step)
        self._step_started = time.monotonic()
        return committed

    def _capture(self) -> CapturedState:
        identity = self._identity
        assert identity is not None
        turn = turn_of(self.step, self._orders.save_every_steps) if self._orders.check_replicas else None
        return self._state.capture(progress=self._progress, identity=identity, turn=turn)

    def report(self, metrics: dict[str, Any]) -> None:
        """Report metrics to Ray Train. The values of rank 0 count; those reported while Ray is still busy are
        merged."""
        self._metrics.update(metrics)
        self._agent.send("report", step=self.step, metrics=metrics)

    def finish(self) -> None:
        """The loop has returned: save what is not saved yet and wait until it is committed."""
        self._page.beat(phase="finishing")
        context = {"rank": self.rank, "step": self.step, "generation": self.generation, "rank_pid": os.getpid()}
        failpoint.hit("finish.begin", **context)
        missing = self._uncalled()
        if missing is not None:
            logger.warning(
                "rank %d: the loop never called session.%s(): it ran unprotected, a failure would have restarted it "
                "from the beginning",
                self.rank,
                missing,
            )
        elif (self._orders.save_at_end or self._save_due) and not self._in_accumulation:
            self._commit_last_step()
        self._saver.close()
        if self._loader is not None:
            self._loader.close()
        failpoint.hit("finish.done", **context)
        self._agent.send("finished", step=self.step, metrics=self._metrics, protected=missing is None)

    def _uncalled(self) -> str | None:
        """The first call without which nothing was saved, None if the loop made them all."""
        if not self._tracked:
            return "track"
        if not self._restored:
            return "restore"
        return "end_step" if self.step == 0 else None

    def _commit_last_step(self) -> None:
        order = self._orders.restore
        if order is not None and order.step == self.step:
            return
        self._progress = replace(self._progress, finished=True)
        if self._loader is not None:
            # A `save_now(wait=True)` in the loop's last round did not know that it was the last.
            self._saver.forget(self.step)
        if not self._save_and_wait():
            logger.error("rank %d: the last step, %d, could not be saved", self.rank, self.step)

    def _require_tracked(self, method: str) -> None:
        if not self._tracked:
            raise CallerError(
                f"session.{method}() was called before session.track(); "
                f"call session.track(model=..., optimizer=..., scheduler=..., data=...) and session.restore() first"
            )
        if not self._restored:
            raise CallerError(
                f"session.{method}() was called before session.restore(); "
                f"call it after session.track(), or a restarted run would begin from zero"
            )
