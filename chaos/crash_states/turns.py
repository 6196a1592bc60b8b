"""Threads that take turns: one runs at a time, and at each storage operation it is drawn anew which one goes on.

So the real code of several ranks runs in an order that a seed fixes. A kill is an exception that nothing catches.
"""

import threading
from collections.abc import Callable, Sequence


class Killed(BaseException):
    """The process is gone: nothing that it would still have done happens."""


class Turns:
    """Call `wait` before each operation. `pick(names)` says whose turn it is; outside of `run` everybody goes on."""

    def __init__(self, pick: Callable[[Sequence[int]], int]) -> None:
        self._pick = pick
        self._changed = threading.Condition()
        self._actors: dict[int, int] = {}  # by thread
        self._waiting: set[int] = set()
        self._running: int | None = None

    def run(self, actors: Sequence[Callable[[], None]]) -> None:
        """All of them, to their ends; raises what one of them raised, Killed before all else."""
        raised: list[BaseException] = []

        def act(index: int) -> None:
            try:
                self._actors[threading.get_ident()] = index
                self.wait()
                actors[index]()
            except BaseException as error:
                raised.append(error)
            finally:
                with self._changed:
                    del self._actors[threading.get_ident()]
                    live.discard(index)
                    self._running = None
                    self._changed.notify_all()

        live = set(range(len(actors)))
        threads = [threading.Thread(target=act, args=(index,)) for index in live]
        for thread in threads:
            thread.start()
        with self._changed:
            while live:
                self._changed.wait_for(lambda: self._running is None and self._waiting == live)
                if live:
                    self._running = self._pick(sorted(live))
                    self._waiting.discard(self._running)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._running is None)
        for thread in threads:
            thread.join()
        for error in sorted(raised, key=lambda error: not isinstance(error, Killed)):
            raise error

    @property
    def me(self) -> int | None:
        """Which actor this thread is; None for one that is none of them."""
        return self._actors.get(threading.get_ident())

    def wait(self) -> None:
        """Until it is this thread's turn; at once for a thread that is none of the actors."""
        me = self.me
        if me is None:
            return
        with self._changed:
            self._waiting.add(me)
            if self._running == me:
                self._running = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running == me)
