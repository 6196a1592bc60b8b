"""How others save: each peer as an arm, and the ranks of plain torch that run peers and floors.

    python saves_peers.py ADDRESS RENDEZVOUS RANK STATE_MIB     (started by saves.py)

What a peer is given is generous: the dict of live tensors is made once, outside of what is measured, and is loaded into
directly. Packages are imported in `prepare`, so that one that is missing fails there, with its own words.
"""

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import saves_floors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saves_training import Arm, Training, join, serve


class Peer(Arm):
    def __init__(self, name: str, *, fsyncs: bool) -> None:
        self.name = name
        self.fsyncs = fsyncs
        self._ended: float | None = None

    def prepare(self, training: Training) -> None:
        self.local = training.local_tensors()
        self.state = training.state_dict()

    def done(self) -> float | None:
        return self._ended

    def file(self, directory: Path) -> Path:
        return directory / f"rank-{dist.get_rank()}"

    def load_local(self, loaded: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.local.items():
            tensor.copy_(loaded[name])


class TorchSave(Peer):
    def begin(self, directory: Path) -> None:
        with open(self.file(directory), "wb") as file:
            torch.save(self.local, file)
            file.flush()
            os.fsync(file.fileno())
        self._ended = time.monotonic()

    def restore(self, directory: Path) -> None:
        self.load_local(torch.load(self.file(directory), weights_only=True))


class Safetensors(Peer):
    def begin(self, directory: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.local, self.file(directory))
        fd = os.open(self.file(directory), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        self._ended = time.monotonic()

    def restore(self, directory: Path) -> None:
        from safetensors.torch import load_file

        self.load_local(load_file(self.file(directory)))


class Dcp(Peer):
    def begin(self, directory: Path) -> None:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(directory))
        self._ended = time.monotonic()

    def restore(self, directory: Path) -> None:
        dcp.load(self.state, checkpoint_id=directory)


class DcpAsync(Dcp):
    """Staging memory is kept from save to save. In the training's process group its collectives hang: it has one."""

    def __init__(self, name: str, *, process: bool, overlapped: bool) -> None:
        super().__init__(name, fsyncs=True)
        self._process = process
        self._overlapped = overlapped
        self._staged: Callable[[], Any] = lambda: None
        self._result: Future[Any] | None = None

    def prepare(self, training: Training) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().prepare(training)
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self._process,
                use_async_staging=self._overlapped,
                use_non_blocking_copy=False,
            )
        )

    def begin(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

        self._ended = None
        answer = dcp.async_save(
            self.state,
            checkpoint_id=directory,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged = answer.staging_completion.result
            answer = answer.upload_completion
        self._result = answer
        answer.add_done_callback(lambda _: setattr(self, "_ended", time.monotonic()))

    def before_optimizer(self) -> None:
        self._staged()

    def done(self) -> float | None:
        if self._ended is not None and self._result is not None:
            self._result.result()
        return self._ended


class TorchSnapshot(Peer):
    def prepare(self, training: Training) -> None:
        import torchsnapshot

        super().prepare(training)
        self._app_state = {"state": torchsnapshot.StateDict(tensors=self.local)}
        self._problem: BaseException | None = None

    def begin(self, directory: Path) -> None:
        import torchsnapshot

        self._ended = None
        pending = torchsnapshot.Snapshot.async_take(str(directory / "snapshot"), self._app_state)
        threading.Thread(target=self._wait, args=(pending,), daemon=True).start()

    def _wait(self, pending: Any) -> None:
        try:
            pending.wait()
        except BaseException as error:
            self._problem = error
        self._ended = time.monotonic()

    def done(self) -> float | None:
        if self._problem is not None:
            raise self._problem
        return self._ended

    def restore(self, directory: Path) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot(str(directory / "snapshot")).restore(self._app_state)


class NvrxTorch(Peer):
    """`TorchAsyncCheckpoint` with its persistent worker. It is made for GPUs: instead of its copy from there to host
    memory, the copy is made here."""

    def prepare(self, training: Training) -> None:
        without_cuda()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().prepare(training)
        self._saver = TorchAsyncCheckpoint(persistent_queue=True)

    def begin(self, directory: Path) -> None:
        self._ended = None
        self._saver.async_save({name: tensor.clone() for name, tensor in self.local.items()}, self.file(directory))

    def work(self) -> None:
        self._saver.finalize_async_save(blocking=False, no_dist=False)
        if self._ended is None and self._saver._async_calls_queue.get_num_unfinalized_calls() == 0:
            self._ended = time.monotonic()

    def restore(self, directory: Path) -> None:
        self.load_local(torch.load(self.file(directory), weights_only=True))


class NvrxDcp(Dcp):
    """`FileSystemWriterAsync`, written by a forked process, which sees the tensors as they were."""

    def prepare(self, training: Training) -> None:
        without_cuda()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        super().prepare(training)
        self._queue = AsyncCallsQueue(persistent=False)

    def begin(self, directory: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )

        self._ended = None
        writer = FileSystemWriterAsync(directory, thread_count=1)
        planned = save_state_dict_async_plan(self.state, writer, None, 0, planner=dcp.DefaultSavePlanner())
        save, preload, arguments = writer.get_save_function_and_args()
        self._queue.schedule_async_request(
            AsyncRequest(save, arguments, [lambda: save_state_dict_async_finalize(*planned)], {}, preload)
        )

    def work(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        if self._ended is None and self._queue.get_num_unfinalized_calls() == 0:
            self._ended = time.monotonic()


def without_cuda() -> None:
    """NVRx asks CUDA for what is not there on a CPU."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: torch.device("cpu")


def peers() -> list[Arm]:
    return [
        TorchSave("torch.save", fsyncs=True),
        Safetensors("safetensors", fsyncs=True),
        Dcp("dcp.save", fsyncs=True),
        DcpAsync("dcp.async-thread", process=False, overlapped=False),
        DcpAsync("dcp.async-thread-overlapped", process=False, overlapped=True),
        DcpAsync("dcp.async-process", process=True, overlapped=False),
        DcpAsync("dcp.async-process-overlapped", process=True, overlapped=True),
        TorchSnapshot("torchsnapshot.async", fsyncs=False),
        NvrxDcp("nvrx-dcp-fork", fsyncs=True),
        NvrxTorch("nvrx-torch-persistent", fsyncs=False),
    ]


def main() -> None:
    address, rendezvous, rank, state_mib = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    join(rendezvous, rank)
    arms = {arm.name: arm for arm in (*saves_floors.floors(), *saves_floors.floors_again(), *peers())}
    serve(address, {"group": "plain", "rank": rank}, Training(state_mib), arms, idle=contextlib.nullcontext)
    os._exit(0)  # what peers leave running is ended by the driver


if __name__ == "__main__":
    main()
