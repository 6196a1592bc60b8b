"""How bytes get from tensors into a slot: by the processor, or by a GPU in a stream beside the training's.

Whoever copies keeps to the same rules on both: `follow` before copying what the loop's thread has computed; `mark`
after it; the loop's thread `hold`s at a mark before it changes what was copied; a slot is complete only after `wait`.
On the CPU all is done when the call returns, so the rules cost nothing there.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from workers.checkpoint.slots import Slot

logger = logging.getLogger("lastgood")


class Mark(Protocol):
    """A point in a stream: all that was asked of it before."""

    def wait(self) -> None:
        """Block until it is reached."""

    def hold(self) -> None:
        """Have what the calling thread asks of the device from now on happen after it."""


class CopyStream(Protocol):
    def pin(self, slot: Slot) -> None:
        """Prepare a slot's memory, once, for copies from the device."""

    def unpin(self, slot: Slot) -> None:
        """Before the slot is closed."""

    def follow(self) -> None:
        """Have later copies happen after all that the calling thread has asked of the device."""

    def active(self) -> AbstractContextManager[Any]:
        """What the calling thread asks of the device within it happens in this stream."""

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy each source to its target; the interpreter lock is not held meanwhile."""

    def mark(self) -> Mark:
        """The point after all copies asked for so far."""


class _Reached:
    def wait(self) -> None:
        return

    def hold(self) -> None:
        return


class HostStream:
    """Copies with the calling thread."""

    def pin(self, slot: Slot) -> None:
        return

    def unpin(self, slot: Slot) -> None:
        return

    def follow(self) -> None:
        return

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(targets, sources)

    def mark(self) -> Mark:
        return _Reached()


class CudaStream:
    """Copies in a side stream of a GPU, into slots that are page-locked so that the copies run beside everything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: set[int] = set()

    def pin(self, slot: Slot) -> None:
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failed = int(runtime.cudaHostRegister(_address(slot), slot.capacity, 0))
        if failed:
            # Copies work all the same, but the loop waits for them.
            logger.warning("a snapshot slot of %d bytes cannot be page-locked: CUDA error %d", slot.capacity, failed)
        else:
            self._pinned.add(_address(slot))

    def unpin(self, slot: Slot) -> None:
        if _address(slot) in self._pinned:
            self._pinned.remove(_address(slot))
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(_address(slot))

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with self.active():
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream.record_event(), self._device)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def stream_for(device: torch.device) -> CopyStream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


def _address(slot: Slot) -> int:
    return torch.frombuffer(slot.image, dtype=torch.uint8).data_ptr()
