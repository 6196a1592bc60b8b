"""Slots: the memory that a rank's snapshots live in. A slot belongs to the keeper and is mapped by both sides.

A slot is an anonymous file (memfd): one page of header, then the image, page-aligned so that it can be written with
O_DIRECT as it is. It is passed over a Unix socket, has no name to leak, and lives as long as anyone holds it.

    FREE -> WRITING -> COMPLETE             by the rank
    COMPLETE -> HELD -> COMPLETE -> FREE    by the keeper: HELD while it persists, FREE when the step is not needed
    COMPLETE, with the image's digest       by the keeper, once it has read all of it; the state stays

Invariants: the header says COMPLETE or HELD only if every byte of the image is there, because it is written after
them; its checksum covers all fields, so a header that was half written by a killed rank reads as TORN, never as another
state. A digest is of the very image that is there: who begins another one forgets it. The size is sealed: no holder
can shrink the memory under another one.

Faults survived: the rank killed at any point; the keeper killed (the rank still holds the memory, and its digest).
"""

import contextlib
import enum
import fcntl
import mmap
import os
import struct

import xxhash

from workers.checkpoint import huge_pages
from workers.checkpoint.header import PAGE_BYTES
from workers.errors import EnvironmentProblem, LastgoodError

HEADER_BYTES = PAGE_BYTES
_MAGIC = b"lgslot\0\2"
_FIELDS = struct.Struct("<8sIIQQQ16s")  # magic, state, rank, generation, step, image bytes, digest
_CHECKSUM = struct.Struct("<Q")
_NO_DIGEST = bytes(16)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlotState(enum.Enum):
    """Where a slot stands. TORN is never written: it is what an invalid header reads as."""

    FREE = 1
    WRITING = 2
    COMPLETE = 3
    HELD = 4
    TORN = 0


class SlotUsedWrongly(LastgoodError):
    """A slot was asked for a transition that its state does not allow, or is not a slot at all."""


class Slot:
    """One snapshot's memory. `fd` stays open until `close`; pass it with SCM_RIGHTS.

    `image` is the writable memory after the header, `capacity` bytes, a multiple of the page size. Of a snapshot, the
    first `image_bytes` of it are the shard file.
    """

    def __init__(self, fd: int, *, populate: bool = True) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        # Populated: the first copy into untouched memory would run at a seventh of the speed.
        self._memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
        self._view = memoryview(self._memory)
        self.image = self._view[HEADER_BYTES:]
        self.capacity = len(self.image)

    @classmethod
    def create(cls, image_bytes: int) -> "Slot":
        """A FREE slot for images of up to this size; EnvironmentProblem if there is no memory for it."""
        size = HEADER_BYTES + -(-max(image_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("lastgood-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            huge_pages.back(fd, size)
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            slot = cls(fd)
        except OSError as error:
            os.close(fd)
            raise EnvironmentProblem(
                f"a snapshot slot of {size / 2**20:,.0f} MiB cannot be allocated ({error}); lower "
                f"RecoveryConfig.snapshot_slots or use more nodes"
            ) from error
        slot._write(SlotState.FREE, rank=0, generation=0, step=0, image_bytes=0)
        return slot

    @classmethod
    def from_fd(cls, fd: int, *, populate: bool = True) -> "Slot":
        """Map a slot that another process created, and take over its descriptor.

        `populate`: map all of it now; else what is touched, when it is.
        """
        size = os.fstat(fd).st_size
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            sealed = False
        if not sealed or size <= HEADER_BYTES or size % PAGE_BYTES:
            raise SlotUsedWrongly(f"descriptor {fd} is not a snapshot slot")
        return cls(fd, populate=populate)

    @property
    def state(self) -> SlotState:
        """The state now; the other side may change it at any time, each side only in its own transitions."""
        return self._read()[0]

    @property
    def rank(self) -> int:
        """The rank that `begin` was called by."""
        return self._read()[1]

    @property
    def generation(self) -> int:
        """The generation of the snapshot in it."""
        return self._read()[2]

    @property
    def step(self) -> int:
        """The step of the snapshot in it."""
        return self._read()[3]

    @property
    def image_bytes(self) -> int:
        """Length of the image; 0 unless COMPLETE or HELD."""
        return self._read()[4]

    @property
    def digest(self) -> str:
        """xxh3_128 of the image in hexadecimal, "" while it is not known."""
        digest = self._read()[5]
        return "" if digest == _NO_DIGEST else digest.hex()

    @property
    def memory_id(self) -> int:
        """The same for all mappings of one slot on this machine, and for no other slot's."""
        return os.fstat(self.fd).st_ino

    def begin(self, rank: int, generation: int, step: int) -> None:
        """FREE -> WRITING; from here until `complete` the image is torn."""
        self._expect(SlotState.FREE)
        self._write(SlotState.WRITING, rank=rank, generation=generation, step=step, image_bytes=0)

    def complete(self, image_bytes: int) -> None:
        """WRITING -> COMPLETE, after the image's last byte."""
        self._expect(SlotState.WRITING)
        if not 0 < image_bytes <= self.capacity:
            raise SlotUsedWrongly(f"an image of {image_bytes} bytes is not in a slot of {self.capacity}")
        _, rank, generation, step, _, _ = self._read()
        self._write(SlotState.COMPLETE, rank=rank, generation=generation, step=step, image_bytes=image_bytes)

    def set_digest(self, digest: str) -> None:
        """COMPLETE, with the digest of the image."""
        self._expect(SlotState.COMPLETE)
        self._change(SlotState.COMPLETE, bytes.fromhex(digest))

    def hold(self) -> None:
        """COMPLETE -> HELD: it is being persisted, and the rank must not reuse it."""
        self._expect(SlotState.COMPLETE)
        self._change(SlotState.HELD)

    def resume(self) -> None:
        """HELD -> COMPLETE, when it is persisted, or its keeper is dead; any other state stays as it is."""
        if self.state is SlotState.HELD:
            self._change(SlotState.COMPLETE)

    def release(self) -> None:
        """Any state -> FREE. For WRITING and TORN only once the rank that wrote it is known to be dead."""
        self._write(SlotState.FREE, rank=0, generation=0, step=0, image_bytes=0)

    def close(self) -> None:
        """Unmap and close the descriptor; the memory is freed with its last holder."""
        self.image.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # someone still has a view, and the mapping ends with it
            self._memory.close()
        os.close(self.fd)

    def _expect(self, wanted: SlotState) -> None:
        state = self.state
        if state is not wanted:
            raise SlotUsedWrongly(f"the slot is {state.name}, and must be {wanted.name} for this")

    def _change(self, state: SlotState, digest: bytes | None = None) -> None:
        _, rank, generation, step, image_bytes, known = self._read()
        self._write(state, rank=rank, generation=generation, step=step, image_bytes=image_bytes, digest=digest or known)

    def _write(
        self,
        state: SlotState,
        *,
        rank: int,
        generation: int,
        step: int,
        image_bytes: int,
        digest: bytes = _NO_DIGEST,
    ) -> None:
        fields = _FIELDS.pack(_MAGIC, state.value, rank, generation, step, image_bytes, digest)
        self._view[: _FIELDS.size + _CHECKSUM.size] = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    def _read(self) -> tuple[SlotState, int, int, int, int, bytes]:
        fields = bytes(self._view[: _FIELDS.size])
        (checksum,) = _CHECKSUM.unpack_from(self._view, _FIELDS.size)
        magic, state, rank, generation, step, image_bytes, digest = _FIELDS.unpack(fields)
        if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(fields):
            return SlotState.TORN, 0, 0, 0, 0, _NO_DIGEST
        return SlotState(state), rank, generation, step, image_bytes, digest
