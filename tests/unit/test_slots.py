"""Slots: who may do what when, and that a slot caught mid-write is seen to be torn."""

import gc
import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.checkpoint.persist import persist
from workers.checkpoint.slots import HEADER_BYTES, Slot, SlotState, SlotUsedWrongly
from workers.checkpoint.store import LocalStore


def test_a_snapshot_goes_through_the_states_in_order() -> None:
    slot = Slot.create(10_000)
    assert slot.state is SlotState.FREE
    slot.begin(rank=3, generation=7, step=120)
    assert (slot.state, slot.image_bytes) == (SlotState.WRITING, 0)
    slot.complete(9_999)
    slot.hold()
    assert slot.state is SlotState.HELD
    slot.resume()
    assert slot.state is SlotState.COMPLETE
    assert (slot.rank, slot.generation, slot.step, slot.image_bytes) == (3, 7, 120, 9_999)
    slot.release()
    assert (slot.state, slot.image_bytes) == (SlotState.FREE, 0)
    slot.close()


def test_the_image_has_whole_pages_and_starts_on_one() -> None:
    for wanted in (0, 1, 4096, 4097):
        slot = Slot.create(wanted)
        assert slot.capacity >= wanted
        assert slot.capacity == len(slot.image)
        assert slot.capacity % 4096 == 0
        slot.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["begin", "complete", "hold", "resume", "release"]), max_size=12))
def test_only_the_allowed_transitions_succeed_and_a_refused_one_changes_nothing(calls: list[str]) -> None:
    allowed = {
        ("begin", SlotState.FREE): SlotState.WRITING,
        ("complete", SlotState.WRITING): SlotState.COMPLETE,
        ("hold", SlotState.COMPLETE): SlotState.HELD,
    }
    slot = Slot.create(1)
    state = SlotState.FREE
    for call in calls:
        action = {
            "begin": lambda: slot.begin(rank=0, generation=1, step=2),
            "complete": lambda: slot.complete(1),
            "hold": slot.hold,
            "resume": slot.resume,
            "release": slot.release,
        }[call]
        if call in ("release", "resume"):
            action()
            if call == "release":
                state = SlotState.FREE
            elif state is SlotState.HELD:
                state = SlotState.COMPLETE
        elif (call, state) in allowed:
            action()
            state = allowed[call, state]
        else:
            with pytest.raises(SlotUsedWrongly):
                action()
        assert slot.state is state
    slot.close()


def test_an_image_longer_than_the_slot_is_refused() -> None:
    slot = Slot.create(4096)
    slot.begin(rank=0, generation=1, step=1)
    with pytest.raises(SlotUsedWrongly):
        slot.complete(4097)
    slot.close()


def test_both_holders_see_one_memory_after_passing_the_descriptor() -> None:
    created = Slot.create(8192)
    left, right = socket.socketpair()
    socket.send_fds(left, [b"x"], [created.fd])
    _, fds, _, _ = socket.recv_fds(right, 1, 1)
    mapped = Slot.from_fd(fds[0])
    created.begin(rank=1, generation=2, step=3)
    created.image[:5] = b"hello"
    created.complete(5)
    assert (mapped.state, mapped.step, bytes(mapped.image[:5])) == (SlotState.COMPLETE, 3, b"hello")
    mapped.hold()
    assert created.state is SlotState.HELD
    created.close()
    assert bytes(mapped.image[:5]) == b"hello"
    mapped.close()
    left.close()
    right.close()


def test_the_memory_cannot_be_shrunk_or_grown_by_any_holder() -> None:
    slot = Slot.create(8192)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, size)
    slot.close()


def test_what_is_not_a_slot_is_refused(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 8192)
    unsealed = os.memfd_create("other")
    os.ftruncate(unsealed, 8192)
    for descriptor in (file, unsealed):
        with pytest.raises(SlotUsedWrongly):
            Slot.from_fd(descriptor)
        os.close(descriptor)


def test_closing_leaves_no_descriptor_or_mapping_behind() -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("lastgood-slot")
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return maps, sum("lastgood-slot" in link for link in links)

    gc.collect()  # what other tests have dropped
    before = held()
    slots = [Slot.create(1 << 20) for _ in range(3)]
    assert min(now - then for now, then in zip(held(), before, strict=True)) >= 3
    for slot in slots:
        slot.close()
    assert held() == before


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(1, 63), step=st.integers(1, 2**40), image_bytes=st.integers(1, 4096), is_digest=st.booleans())
def test_a_header_that_was_half_written_is_torn_or_as_before_or_as_after(
    cut: int, step: int, image_bytes: int, is_digest: bool
) -> None:
    slot = Slot.create(4096)
    slot.begin(rank=1, generation=7, step=step)
    header = memoryview(bytearray(64))
    with memoryview(slot.image.obj)[:64] as memory:  # type: ignore[arg-type]  # the mapping behind the view
        if is_digest:
            slot.complete(image_bytes)
        before = bytes(memory)
        slot.set_digest("5a" * 16) if is_digest else slot.complete(image_bytes)
        after = bytes(memory)
        header[:] = after[:cut] + before[cut:]
        memory[:] = header
        if header not in (before, after):
            assert slot.state is SlotState.TORN
    slot.close()


def test_a_digest_stays_with_its_image_and_is_seen_by_all_holders() -> None:
    slot = Slot.create(4096)
    slot.begin(rank=1, generation=7, step=40)
    with pytest.raises(SlotUsedWrongly):
        slot.set_digest("5a" * 16)
    slot.complete(100)
    assert slot.digest == ""
    slot.set_digest("5a" * 16)
    slot.hold()
    other = Slot.from_fd(os.dup(slot.fd), populate=False)
    assert (other.state, other.digest, other.image_bytes) == (SlotState.HELD, "5a" * 16, 100)
    assert other.memory_id == slot.memory_id
    slot.resume()
    assert slot.digest == "5a" * 16
    slot.release()
    slot.begin(rank=1, generation=7, step=41)
    slot.complete(100)
    assert other.digest == "", "another image has the digest of the one before"
    other.close()
    slot.close()


def _die_while_writing(descriptor: int) -> None:
    slot = Slot.from_fd(descriptor)
    slot.begin(rank=0, generation=1, step=40)
    slot.image[:100] = b"x" * 100
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_slot_whose_writer_was_killed_stays_writing_and_can_be_released() -> None:
    slot = Slot.create(8192)
    process = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(slot.fd,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (slot.state, slot.step) == (SlotState.WRITING, 40)
    with pytest.raises(SlotUsedWrongly):
        slot.hold()
    slot.release()
    assert slot.state is SlotState.FREE
    slot.close()


def test_a_slot_is_written_to_storage_as_it_is(tmp_path: Path) -> None:
    slot = Slot.create(HEADER_BYTES * 3)
    slot.begin(rank=0, generation=1, step=1)
    slot.image[:9000] = os.urandom(9000)
    slot.complete(9000)
    persist(LocalStore(tmp_path), "file", slot.image, slot.image_bytes, context={})
    assert (tmp_path / "file").read_bytes() == bytes(slot.image[:9000])
    slot.close()
