"""The zygote: ranks forked on command, told of when they end, and gone with it."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from fakes import DEADLINE_SECONDS, make_orders

from workers import processes
from workers.forks import ForkedRank, ZygoteClient
from workers.messages import RankMemory, RankPulse, StacksDumped
from workers.observer import RankObserver

# Importing torch takes seconds, more on a machine that does other things as well.
PRELOAD_SECONDS = 120.0


def train_loop(config: dict[str, str]) -> None:
    """What it does goes by the generation, so that one zygote serves all tests."""
    import os
    import signal
    import subprocess
    import threading

    import workers
    from workers.errors import CallerError, CheckpointDamaged

    session = workers.get_session()
    match session.generation:
        case 7:
            os._exit(7)
        case 9:
            os.kill(os.getpid(), signal.SIGKILL)
        case 20:
            raise ValueError("the user's mistake")
        case 21:
            raise CallerError("the caller's mistake")
        case 22:
            raise CheckpointDamaged("shard 0 lost its tail")
        case 30:
            child = subprocess.Popen(["sleep", "600"])
            session.report({"child": child.pid})
            threading.Event().wait()
        case 40:
            import torch

            value = float(torch.ones(64, 64).mm(torch.ones(64, 64)).sum())
            threads = torch.get_num_threads()
            report = {"value": value, "threads": threads, "leader": os.getpgid(0) == os.getpid(), **config}
            session.report(report)


class Zygote:
    """A client and what its zygote has said."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        self._inherited = os.open("/dev/null", os.O_RDONLY)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        payload = cloudpickle.dumps((train_loop, {"greeting": "hello"}))
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        self.directory = Path(tempfile.mkdtemp())
        self.client = ZygoteClient(
            preload=preload, payload=payload, inherited_fd=self._inherited, directory=self.directory
        )

    def hear(self, timeout_seconds: float = DEADLINE_SECONDS) -> tuple[dict[str, Any], list[int]]:
        received = self.client.channel.receive(timeout_seconds)
        assert received is not None, "the zygote has ended"
        return received

    def fork(self) -> ForkedRank:
        """A rank whose pid is known."""
        rank = self.client.fork()
        message, fds = self.hear()
        assert (message["kind"], message["token"]) == ("forked", rank.token)
        rank.process = processes.ProcessId(pid=message["pid"], start_ticks=message["start_ticks"])
        rank.pidfd = fds[0]
        return rank

    def start(self, rank: ForkedRank, generation: int, tmp_path: Path) -> None:
        """Have it run the loop."""
        assert said_by(rank, "ready")["store_port"] > 0
        orders = make_orders(tmp_path, generation=generation, save_at_end=False, threads=2)
        rank.channel.send("start", orders=orders.to_json())

    def wait_for_exit(self, rank: ForkedRank) -> int:
        message, _ = self.hear()
        assert rank.process is not None
        assert (message["kind"], message["pid"]) == ("exited", rank.process.pid)
        assert abs(time.time() - message["at"]) < DEADLINE_SECONDS
        rank.kill()
        rank.close()
        return int(message["code"])

    def close(self) -> None:
        self.client.close()
        os.close(self._inherited)
        shutil.rmtree(self.directory)


def said_by(rank: ForkedRank, kind: str) -> dict[str, Any]:
    """The next message of a kind from a rank."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        received = rank.channel.receive(max(0.0, deadline - time.monotonic()))
        assert received is not None, f"the rank ended before it said {kind!r}"
        if received[0]["kind"] == kind:
            return received[0]
    raise AssertionError(kind)


def pid_of(rank: ForkedRank) -> int:
    assert rank.process is not None
    return rank.process.pid


def wait_until_gone(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], DEADLINE_SECONDS)[0], f"process {pid} is still there"
    os.close(fd)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    assert zygote.hear(PRELOAD_SECONDS)[0]["kind"] == "ready"
    yield zygote
    zygote.close()


def test_a_forked_rank_runs_the_loop_with_its_threads_and_says_how_it_ended(zygote: Zygote, tmp_path: Path) -> None:
    rank = zygote.fork()
    assert rank.process is not None
    assert rank.process.alive()
    zygote.start(rank, 40, tmp_path)
    metrics = said_by(rank, "report")["metrics"]
    # A matrix product in several threads hangs if the zygote had run one before.
    assert metrics == {"value": 64.0**3, "threads": 2, "leader": True, "greeting": "hello"}
    assert said_by(rank, "finished")["protected"] is False
    assert zygote.wait_for_exit(rank) == 0


@pytest.mark.parametrize(("generation", "code"), [(7, 7), (9, -signal.SIGKILL)])
def test_the_way_a_rank_ended_is_told(generation: int, code: int, zygote: Zygote, tmp_path: Path) -> None:
    rank = zygote.fork()
    zygote.start(rank, generation, tmp_path)
    assert zygote.wait_for_exit(rank) == code


def test_the_pidfd_belongs_to_the_rank(zygote: Zygote) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    assert select.select([rank.pidfd], [], [], 0)[0] == []
    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
    assert zygote.wait_for_exit(rank) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("generation", "kind", "exit_code"), [(20, "ValueError", 1), (21, "CallerError", 2), (22, "CheckpointDamaged", 3)]
)
def test_a_rank_tells_its_error_before_its_end(
    generation: int, kind: str, exit_code: int, zygote: Zygote, tmp_path: Path
) -> None:
    rank = zygote.fork()
    zygote.start(rank, generation, tmp_path)
    if kind == "CheckpointDamaged":
        assert said_by(rank, "restore_failed")["reason"] == "shard 0 lost its tail"
    error = said_by(rank, "error")
    assert (error["type"], error["exit_code"]) == (kind, exit_code)
    assert "in train_loop" in error["traceback"]
    assert zygote.wait_for_exit(rank) == 1


def test_a_kill_takes_the_children_of_a_rank_along(zygote: Zygote, tmp_path: Path) -> None:
    rank = zygote.fork()
    zygote.start(rank, 30, tmp_path)
    child = said_by(rank, "report")["metrics"]["child"]
    assert processes.start_ticks(child) is not None
    rank.kill()
    assert zygote.wait_for_exit(rank) == -signal.SIGKILL
    wait_until_gone(child)


def test_a_rank_that_was_dead_before_the_order_to_kill_it_died_by_itself(zygote: Zygote) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    os.kill(pid_of(rank), signal.SIGKILL)
    assert select.select([rank.pidfd], [], [], DEADLINE_SECONDS)[0]
    rank.kill_on_order()
    assert not rank.kill_ordered
    assert zygote.wait_for_exit(rank) == -signal.SIGKILL


def test_a_death_that_is_told_late_is_as_old_as_the_order_that_found_it_dead(zygote: Zygote, tmp_path: Path) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    os.kill(pid_of(rank), signal.SIGKILL)
    assert select.select([rank.pidfd], [], [], DEADLINE_SECONDS)[0]
    rank.kill_on_order()
    observer = RankObserver(agent="a", rank=1, run_dir=tmp_path, tell=lambda event: None)
    told = observer.exited(rank, pid=pid_of(rank), code=-signal.SIGKILL, at=time.time() + 60)
    assert told.at <= time.time()
    assert not told.ordered
    assert zygote.wait_for_exit(rank) == -signal.SIGKILL


def test_only_a_sigkill_can_be_the_order_to_end(zygote: Zygote, tmp_path: Path) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    rank.kill_on_order()
    observer = RankObserver(agent="a", rank=1, run_dir=tmp_path, tell=lambda event: None)
    assert observer.exited(rank, pid=pid_of(rank), code=-signal.SIGKILL, at=time.time()).ordered
    assert not observer.exited(rank, pid=pid_of(rank), code=-signal.SIGSEGV, at=time.time()).ordered
    assert zygote.wait_for_exit(rank) == -signal.SIGKILL


def test_a_rank_that_was_killed_on_order_twice_was_killed_on_order(zygote: Zygote) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    rank.kill_on_order()
    assert select.select([rank.pidfd], [], [], DEADLINE_SECONDS)[0]
    rank.kill_on_order()
    assert rank.kill_ordered
    assert zygote.wait_for_exit(rank) == -signal.SIGKILL


def test_a_native_crash_is_told_with_its_stack_and_with_the_memory_that_the_rank_used(
    zygote: Zygote, tmp_path: Path
) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    rank.generation = 4
    said: list[RankPulse | RankMemory | StacksDumped] = []
    observer = RankObserver(agent="a", rank=1, run_dir=tmp_path, tell=said.append)
    observer.follow(rank)
    observer.look(rank)
    observer.look(rank)
    assert [(type(one), one.agent, one.generation) for one in said] == [(RankPulse, "a", 4), (RankMemory, "a", 4)]
    os.kill(pid_of(rank), signal.SIGSEGV)
    assert select.select([rank.pidfd], [], [], DEADLINE_SECONDS)[0]
    told = observer.exited(rank, pid=pid_of(rank), code=-signal.SIGSEGV, at=5.0)
    assert zygote.wait_for_exit(rank) == -signal.SIGSEGV
    assert (told.generation, told.ordered, told.out_of_memory) == (4, False, False)
    assert told.detail["signal"] == "SIGSEGV"
    assert "rank.py" in told.detail["stack"]
    assert (tmp_path / told.detail["stacks_file"]).name == "g0004-rank-00001-crash.txt"
    assert isinstance(said[1], RankMemory)
    assert told.detail["memory"] == said[1].memory.to_json()


def test_a_rank_that_gets_no_orders_ends_by_itself(zygote: Zygote) -> None:
    rank = zygote.fork()
    said_by(rank, "ready")
    rank.channel.close()
    message, _ = zygote.hear()
    assert (message["kind"], message["code"]) == ("exited", 0)
    rank.close()


def test_several_ranks_at_once_are_told_apart(zygote: Zygote) -> None:
    ranks = [zygote.fork() for _ in range(2)]
    assert len({rank.process.pid for rank in ranks if rank.process}) == 2
    for rank in ranks:
        said_by(rank, "ready")
        rank.kill()
        assert zygote.wait_for_exit(rank) == -signal.SIGKILL


def test_the_zygote_ends_when_its_channel_closes_and_its_ranks_die_with_it(tmp_path: Path) -> None:
    zygote = Zygote()
    assert zygote.hear(PRELOAD_SECONDS)[0]["kind"] == "ready"
    standby, busy = zygote.fork(), zygote.fork()
    zygote.start(busy, 30, tmp_path)
    child = said_by(busy, "report")["metrics"]["child"]
    zygote.close()
    assert zygote.client._process.returncode == 0
    for rank in (standby, busy):
        assert rank.process is not None
        wait_until_gone(rank.process.pid)
    processes.kill_group(busy.process.pid)  # type: ignore[union-attr]  # what the agent does next
    wait_until_gone(child)
    standby.close()
    busy.close()


def test_a_module_that_starts_a_thread_is_refused_by_the_zygote_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    zygote = Zygote(preload=("json", "has_a_thread"))
    message, _ = zygote.hear(PRELOAD_SECONDS)
    assert message["kind"] == "failed"
    assert message["message"] == (
        "preload module 'has_a_thread' started a thread (2 run now); ranks forked afterwards would hang. "
        "Remove it from RecoveryConfig.preload"
    )
    zygote.close()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "cannot be imported (ModuleNotFoundError: "),
        ("raise RuntimeError('no licence')", "cannot be imported (RuntimeError: no licence); correct RecoveryConfig"),
        (
            "import sys, types\nsys.modules['torch'] = types.SimpleNamespace(\n"
            "    cuda=types.SimpleNamespace(is_initialized=lambda: True))",
            "opened CUDA while it was imported",
        ),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_named(source: str | None, told: str, tmp_path: Path) -> None:
    if source is not None:
        (tmp_path / "special.py").write_text(source)
    code = "from workers.zygote import preload; print(preload(('json', 'special')))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.startswith("preload module 'special' ")
    assert told in done.stdout
    assert "RecoveryConfig.preload" in done.stdout
