"""The ledger: appended to by one, read by many, torn by anyone."""

import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.observe.ledger import Ledger, committed_checkpoints, read_ledger


def open_ledger(directory: Path) -> Ledger:
    return Ledger(directory / "ledger.jsonl", clock=lambda: 1000.5)


def test_an_entry_is_one_json_line_with_version_number_time_and_kind(tmp_path: Path) -> None:
    open_ledger(tmp_path).append("commit", generation=1, step=20, checkpoint="c")
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"v": 1, "seq": 1, "at": 1000.5, "kind": "commit", "generation": 1, "step": 20, "checkpoint": "c"}
    ]


def test_an_event_may_say_itself_when_it_happened(tmp_path: Path) -> None:
    open_ledger(tmp_path).append("failure", at=990.0)
    assert read_ledger(tmp_path / "ledger.jsonl")[0]["at"] == 990.0


def test_numbers_go_on_after_the_ledger_is_opened_again(tmp_path: Path) -> None:
    open_ledger(tmp_path).append("generation")
    open_ledger(tmp_path).append("generation")
    assert [entry["seq"] for entry in read_ledger(tmp_path / "ledger.jsonl")] == [1, 2]


@given(st.integers(0, 200))
def test_wherever_a_kill_cuts_the_file_the_whole_entries_and_the_following_ones_are_read(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        first = open_ledger(path.parent)
        for step in range(4):
            first.append("commit", step=step)
        data = path.read_bytes()
        kept = data[: len(data) - min(cut, len(data))]
        path.write_bytes(kept)
        # A line that only lacks its newline is whole.
        whole = sum(1 for end in range(1, len(data) + 1) if data[end : end + 1] == b"\n" and end <= len(kept))
        open_ledger(path.parent).append("commit", step=99)
        assert [entry["step"] for entry in read_ledger(path)] == [*range(whole), 99]
        seqs = [entry["seq"] for entry in read_ledger(path)]
        assert seqs == sorted(set(seqs))


def test_a_line_of_another_writer_or_damage_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.append("commit", step=1)
    with open(tmp_path / "ledger.jsonl", "ab") as file:
        file.write(b'\xff\xfe{"v":1\n[1,2]\n"x"\n{"seq":"1","kind":2}\n\n')
    ledger.append("commit", step=2)
    assert [entry["step"] for entry in read_ledger(tmp_path / "ledger.jsonl")] == [1, 2]


def test_values_that_json_does_not_have_become_strings(tmp_path: Path) -> None:
    fields = {"loss": math.nan, "worst": -math.inf, "path": tmp_path, "names": {"b", "a"}, "pair": (1, None)}
    open_ledger(tmp_path).append("first_step", **fields)
    line = (tmp_path / "ledger.jsonl").read_text()
    entry = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert entry["loss"] == "nan"
    assert entry["worst"] == "-inf"
    assert entry["path"] == str(tmp_path)
    assert entry["names"] == ["a", "b"]
    assert entry["pair"] == [1, None]


def test_a_field_cannot_take_the_place_of_the_sequence_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seq"):
        open_ledger(tmp_path).append("commit", seq=7)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_full_disk_stops_nothing_and_the_next_line_says_how_many_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(tmp_path)
    ledger.append("commit", step=1)
    real_write = os.write

    def short_write(descriptor: int, data: bytes) -> int:
        real_write(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", short_write)
        ledger.append("commit", step=2)
        ledger.append("commit", step=3)
    ledger.append("commit", step=4)
    ledger.append("commit", step=5)
    entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [(entry["step"], entry.get("lost")) for entry in entries] == [(1, None), (4, 2), (5, None)]


def test_what_a_run_relies_on_as_evidence_is_durable_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    ledger.append("snapshot", step=1)
    assert not synced
    ledger.append("commit", step=1)
    assert synced


def test_a_stalled_disk_is_waited_for_once_and_nothing_is_lost_or_out_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.observe.ledger._PATIENCE_SECONDS", 0.2)
    ledger = open_ledger(tmp_path)
    goes_on = threading.Event()
    with monkeypatch.context() as stalled:
        stalled.setattr(os, "fsync", lambda _: goes_on.wait(60))
        began = time.monotonic()
        for step in range(50):
            ledger.append("commit", step=step)
        assert time.monotonic() - began < 5, "each was waited for"
        goes_on.set()
        ledger.append("commit", step=50)
        deadline = time.monotonic() + 30
        while len(read_ledger(tmp_path / "ledger.jsonl")) < 51 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [entry["step"] for entry in read_ledger(tmp_path / "ledger.jsonl")] == list(range(51))


def test_committed_checkpoints_are_those_of_commit_entries() -> None:
    entries = [{"kind": "commit", "checkpoint": "a"}, {"kind": "quarantine", "checkpoint": "b"}, {"kind": "commit"}]
    assert committed_checkpoints(entries) == {"a"}


def test_no_ledger_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_ledger(tmp_path / "ledger.jsonl")
