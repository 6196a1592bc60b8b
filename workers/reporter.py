"""Reports commits to Ray Train, and asks it for draining nodes, on a thread of its own.

`ray.train.report` blocks until all workers have called it, without limit, and one call too many on one worker hangs
the run at its end. So all agents make the same numbered sequence of calls, in the coordinator's order, and agree on
the last number. An error is told, never raised: Ray's books do not decide what is saved.
"""

import queue
import threading
from collections.abc import Callable

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from workers.messages import AskDraining, NodesDraining, Report, Reported
from workers.ray_storage import ray_storage

_LAST_REPORT_SECONDS = 60.0


class Reporter:
    def __init__(self, tell: Callable[[Reported], None], agent: str) -> None:
        self._tell = tell
        self._agent = agent
        self._queue: queue.SimpleQueue[Report | AskDraining] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.queued = 0
        self.done = 0
        self.asked_last = 0
        threading.Thread(target=self._work, name="lastgood-report", daemon=True).start()

    def queue(self, call: Report | AskDraining) -> None:
        """Queue a call; one that was queued before (a repeat after the coordinator's restart) is dropped."""
        if call.number == self.queued + 1:
            self.queued = call.number
            if isinstance(call, AskDraining):
                self.asked_last = call.number
            self._queue.put(call)

    def wait_until_done(self, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.done >= number, _LAST_REPORT_SECONDS)

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            error: str | None = None
            draining: NodesDraining | None = None
            try:
                if isinstance(call, AskDraining):
                    draining = _draining()
                else:
                    _report(call)
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
            with self._changed:
                self.done = call.number
                self._changed.notify_all()
            self._tell(Reported(agent=self._agent, number=call.number, error=error, draining=draining))


def _report(report: Report) -> None:
    ray.train.report(
        report.metrics,
        checkpoint=Checkpoint(report.checkpoint, filesystem=ray_storage()) if report.checkpoint else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def _draining() -> NodesDraining | None:
    info = ray.train.get_preemption_info()
    if info is None:
        return None
    deadline_at = None if info.deadline_ms is None else info.deadline_ms / 1000
    return NodesDraining(nodes=tuple(info.preempted_node_ids), deadline_at=deadline_at)
