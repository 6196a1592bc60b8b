"""`lastgood status` and `events`, once and as the run goes on: on a terminal, in a pipe, and before there is a run."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_samples import healthy

from orchestrator.observe.ledger import Ledger
from orchestrator.observe.tail import Tail

_DEADLINE_SECONDS = 60.0
_MAIN = "from orchestrator.cli.app import main; main()"


class Command:
    """`lastgood ARGUMENTS`, its standard output and error on a terminal or in a pipe."""

    def __init__(self, *arguments: str, terminal: bool, **environment: str) -> None:
        self._end, child = pty.openpty() if terminal else os.pipe()
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *arguments],
            stdin=child if terminal else subprocess.DEVNULL,
            stdout=child,
            stderr=child,
            env=env | {"TERM": "xterm", "COLUMNS": "100"} | environment,
            start_new_session=True,
        )
        os.close(child)
        self.shown = ""

    def until(self, wanted: str) -> str:
        """All that was shown up to when it showed that."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while wanted not in self.shown:
            assert time.monotonic() < deadline, f"it never showed {wanted!r}: {self.shown}"
            if select.select([self._end], [], [], 1.0)[0]:
                try:
                    data = os.read(self._end, 65536)
                except OSError:  # a terminal whose last user is gone
                    data = b""
                assert data, f"it ended without showing {wanted!r}: {self.shown}"
                self.shown += data.decode()
        return self.shown

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(_DEADLINE_SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    made: list[Command] = []
    yield made
    for command in made:
        command.close()


def started(commands: list[Command], *arguments: str, terminal: bool, **environment: str) -> Command:
    commands.append(Command(*arguments, terminal=terminal, **environment))
    return commands[-1]


def run_of(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for one in healthy().entries:
        ledger.append(**{name: value for name, value in one.items() if name not in ("v", "seq")})
    return ledger


def test_watching_on_a_terminal_stays_in_place_and_ends_clean_by_an_interrupt(
    tmp_path: Path, commands: list[Command]
) -> None:
    ledger = run_of(tmp_path)
    ledger.append("exporter", driver="d1", host="127.0.0.1", port=4711, wanted_port=0, problem=None)
    command = started(commands, "status", str(tmp_path), "--watch", terminal=True)
    shown = command.until("http://127.0.0.1:4711/")
    assert "\x1b[32mtraining" in shown  # in colour
    ledger.append("commit", generation=3, step=390, checkpoint="c", durable_seconds=1.0, bytes=1)
    command.until("up to step 390")
    assert command.interrupt() == 130
    assert command.until("\x1b[?25h")  # the cursor is back
    assert "Traceback" not in command.shown


def test_no_color_means_none(tmp_path: Path, commands: list[Command]) -> None:
    run_of(tmp_path)
    shown = started(commands, "status", str(tmp_path), terminal=True, NO_COLOR="1").until("last cause")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)


def test_in_a_pipe_nothing_is_animated_and_each_change_is_told_once(tmp_path: Path, commands: list[Command]) -> None:
    ledger = run_of(tmp_path)
    command = started(commands, "status", str(tmp_path), "--watch", terminal=False)
    command.until("last cause")
    ledger.append("finished", generation=3, step=1000, protected=True)
    shown = command.until("finished")
    assert command.process.wait(_DEADLINE_SECONDS) == 0
    assert "\x1b" not in shown
    assert shown.count("state ") == 2


def test_scripts_get_one_object_for_each_change(tmp_path: Path, commands: list[Command]) -> None:
    ledger = run_of(tmp_path)
    command = started(commands, "status", str(tmp_path), "--watch", "--json", terminal=False)
    command.until("}\n")
    ledger.append("stopped", driver="d1", reason="enough", error_type="TrainingFailed", report=None)
    command.until("enough")
    assert command.process.wait(_DEADLINE_SECONDS) == 0
    told = [json.loads(line) for line in command.shown.splitlines()]
    assert [one["state"] for one in told] == ["training", "stopped"]


def test_a_run_that_has_not_begun_is_waited_for_and_said_so(tmp_path: Path, commands: list[Command]) -> None:
    watching = started(commands, "status", str(tmp_path / "later"), "--watch", terminal=True)
    following = started(commands, "events", str(tmp_path / "later"), "--follow", terminal=False)
    for command in (watching, following):
        command.until("waiting for a run to begin there")
    (tmp_path / "later").mkdir()
    run_of(tmp_path / "later")
    watching.until("training, generation 3")
    following.until("generation=3")
    assert following.interrupt() == 130
    assert "Traceback" not in following.shown


def test_what_would_steer_the_terminal_is_not_printed(tmp_path: Path, commands: list[Command]) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("quarantine", checkpoint="c\x1b[2J", reason="\x1b]0;owned\x07 end")
    for name in ("status", "events"):
        shown = started(commands, name, str(tmp_path), terminal=False).until("end")
        assert "\x1b" not in shown and "\x07" not in shown


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    tail = Tail(path)
    assert not tail.exists()
    path.write_text('{"seq": 1, "at": 1, "kind": "a"}\nnot json\n{"seq": 2, "at": 2, "ki')
    assert [one["seq"] for one in tail.read()] == [1]
    with path.open("a") as file:
        file.write('nd": "b"}\n')
    assert [one["seq"] for one in tail.read()] == [2]
    assert tail.read() == []


def test_completion_is_offered_without_loading_ray_or_torch() -> None:
    script = (
        "import sys, atexit; atexit.register(lambda: print('loaded', sorted({'torch', 'ray'} & sys.modules.keys())));"
        f"{_MAIN}"
    )
    env = os.environ | {"_LASTGOOD_COMPLETE": "complete_bash", "COMP_WORDS": "lastgood sta", "COMP_CWORD": "1"}
    code = f"import sys; sys.argv[0] = 'lastgood'; {script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert "status" in done.stdout.split(), done.stderr
    assert "loaded []" in done.stdout
