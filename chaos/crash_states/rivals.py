"""Two drivers of one run at once, on object storage, request by request.

Both are carried out by the code that does it in production, each in a thread; one of them runs at a time, and before
each request, readings too, a schedule says which one goes on. An answer may get lost, so that the client sends its
request again and finds what it did itself; and a driver may end with one request under way, which is carried out when
the other one has long gone on.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from obstore.store import MemoryStore as Client

from chaos.crash_states.driver import MarkingArchive, ObjectDriver
from chaos.crash_states.object_record import RecordedUpload, RecordingObjectStore
from chaos.crash_states.ops import Mark
from chaos.crash_states.requests import RequestLog
from chaos.crash_states.scenario import Course, Plan, Recording
from chaos.crash_states.turns import Killed, Turns
from orchestrator.archive import GENERATIONS_DIR, ScanResult
from orchestrator.decide.commit import Persist
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.generation_file import generation_bytes
from workers.checkpoint.manifest import checkpoint_dir

Play = Literal["takes over", "passes over the newest", "both begin"]
PLAYS: tuple[Play, ...] = ("takes over", "passes over the newest", "both begin")
"""The second driver begins while the first one saves and deletes; it does so and restores an older checkpoint, which
the first one is about to delete; or both begin when an earlier one is gone."""

_STEPS_APART = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """turns: (driver, how many turns it has), one after the other: one up to its first request, and one for each
    request; then each runs to its end, the first of `turns` first. twice: (driver, number) of a request whose answer is
    lost. gone: (driver, number) of its last request."""

    play: Play
    turns: tuple[tuple[int, int], ...] = ()
    twice: tuple[int, int] | None = None
    gone: tuple[int, int] | None = None


@dataclass(slots=True)
class Played:
    """What came of it. requests: how many each driver sent. changes: the numbers of those that were to change
    something. generations: the last that each one created, or 0. errors: by driver. touched: checkpoints of which
    something was deleted while a generation relied on them, with that generation. objects: what is left, by key."""

    schedule: Schedule
    requests: list[int]
    changes: list[set[int]]
    generations: list[int]
    errors: dict[int, Exception]
    touched: list[tuple[str, int]]
    marks: list[Mark]
    objects: dict[str, bytes]
    recording: Recording[Any]


class RivalDriver(ObjectDriver):
    """Its ranks write one after the other."""

    def write_shards(self, name: str, persist: Persist, beside: Sequence[Callable[[], None]]) -> None:
        self.expect_shards(name, persist.step)
        self.conclude(name, persist, {rank: self.persist(name, rank, persist.step) for rank in persist.ranks})


class RivalArchive(MarkingArchive):
    """Marks also which deletions are refused, and what a generation's object holds."""

    def create_generation(self, record: GenerationRecord, *, seen: ScanResult) -> tuple[GenerationRecord, ...]:
        records = super().create_generation(record, seen=seen)
        self._course.mark("holds", path=f"{GENERATIONS_DIR}/{record.number:08d}.json", content=generation_bytes(record))
        return records

    def delete(self, name: str, *, my_generation: int) -> bool:
        deleted = super().delete(name, my_generation=my_generation)
        if not deleted:
            self._course.mark("delete refused", name=name)
        return deleted


class RivalStore(RecordingObjectStore):
    """One process's view of the bucket, whose requests wait for their turn."""

    def __init__(self, client: "_Bucket", log: RequestLog, _before: Callable[[], bool]) -> None:
        super().__init__(client.bare, log)
        self._client = cast(Client, client)

    def begin_upload(self, key: str) -> RecordedUpload:
        return RecordedUpload(self, key, _Upload(cast(Client, self._client), key))

    def drop(self, path: str) -> None:
        self.log.mark("drops", path=path)
        super().drop(path)


RivalDriver.object_store_kind = RivalStore
RivalDriver.archive_kind = RivalArchive


def play(schedule: Schedule, kind: type[RivalDriver] = RivalDriver) -> Played:
    """Carry out a schedule in a bucket of its own. `kind`: with another protocol than the real one."""
    stage = _Stage(schedule)
    course = stage.course
    first = kind(course)
    first.begin("start")
    first.save(_STEPS_APART)
    if schedule.play == "passes over the newest":
        first.save(2 * _STEPS_APART)
    back = schedule.play == "passes over the newest"

    def go_on() -> None:
        stage.drivers[0] = first
        _save_and_clean_up(first)

    def begin(number: int) -> None:
        driver = stage.drivers[number] = kind(course)
        driver.begin("failure", back=back)
        _save_and_clean_up(driver)

    actors: list[Callable[[], None]] = [
        partial(begin, 0) if schedule.play == "both begin" else go_on,
        partial(begin, 1),
    ]
    course.turns.run([stage.guarded(number, actor) for number, actor in enumerate(actors)])
    bare = stage.bucket.bare
    marks = [event for event in course.log.ops if isinstance(event, Mark)]
    created = {mark.facts["path"]: (mark.facts["content"],) for mark in marks if mark.kind == "holds"}
    return Played(
        schedule=schedule,
        requests=stage.requests,
        changes=stage.changes,
        generations=[stage.drivers[number].generation if number in stage.drivers else 0 for number in (0, 1)],
        errors=stage.errors,
        touched=stage.touched,
        marks=marks,
        objects={entry["path"]: bytes(bare.get(entry["path"]).bytes()) for chunk in bare.list() for entry in chunk},
        recording=Recording(plan=course.plan, ops=(), expected=course.expected | created, images=course.images),
    )


def _save_and_clean_up(driver: RivalDriver) -> None:
    driver.clean_up()
    driver.save(driver.step + _STEPS_APART)
    driver.clean_up()


class _Stage:
    """What a schedule is carried out on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bucket = _Bucket(self)
        self.course = Course(Plan(seed=0, ranks=1, keep_last=1), self.bucket, RequestLog())
        self.course.turns = Turns(self._pick)
        self.drivers: dict[int, RivalDriver] = {}
        self.requests = [0, 0]
        self.changes: list[set[int]] = [set(), set()]
        self.errors: dict[int, Exception] = {}
        self.touched: list[tuple[str, int]] = []
        self._turns = list(schedule.turns)
        self._first = schedule.turns[0][0] if schedule.turns else 0
        self._ended: set[int] = set()

    def guarded(self, number: int, actor: Callable[[], None]) -> Callable[[], None]:
        """It ends when it is told to, or at an error, which is kept."""

        def act() -> None:
            try:
                with contextlib.suppress(Killed):
                    actor()
            except Exception as error:  # whatever it is: the judge looks at it
                self.errors[number] = error
            self._ended.add(number)

        return act

    def turn(self, changes: bool) -> bool:
        """Before a request: wait until it may be sent. Whether its answer is going to be lost."""
        me = self.course.turns.me
        if me is None:
            return False
        if not self._goes_on(me):
            self.course.turns.wait()
        if self.schedule.gone == (me, self.requests[me]):
            raise Killed
        self.requests[me] += 1
        if changes:
            self.changes[me].add(self.requests[me])
        return self.schedule.twice == (me, self.requests[me])

    def deleting(self, key: str) -> None:
        """A key is deleted: what the newest generation relies on must not be, but by itself."""
        created = [mark.facts for mark in self._marks("generation created")]
        newest = max(created, key=lambda facts: int(facts["number"]), default=None)
        if newest is None or newest["parent"] is None or not key.startswith(f"{checkpoint_dir(newest['parent'])}/"):
            return
        number, parent = int(newest["number"]), str(newest["parent"])
        deletes = [mark.facts for mark in self._marks("delete begins")]
        if not any(one["name"] == parent and one["generation"] >= number for one in deletes):
            self.touched.append((parent, number))

    def _marks(self, kind: str) -> list[Mark]:
        return [event for event in self.course.log.ops if isinstance(event, Mark) and event.kind == kind]

    def _goes_on(self, me: int) -> bool:
        """Whether it is still this one's turn; then one request of it is used up. To switch takes a while."""
        if len(self._ended) == 1:
            return True
        if self._turns and self._turns[0][0] == me and self._turns[0][1] > 0:
            self._turns[0] = (me, self._turns[0][1] - 1)
            return True
        return not self._turns and me == self._first

    def _pick(self, live: Sequence[int]) -> int:
        while self._turns:
            actor, left = self._turns[0]
            if left > 0 and actor in live:
                self._turns[0] = (actor, left - 1)
                return actor
            self._turns.pop(0)
        return self._first if self._first in live else live[0]


@dataclass(slots=True)
class _Bucket:
    """What stands in for obstore's store in memory, which is `bare`. Each method is a request."""

    stage: _Stage
    bare: Client = field(default_factory=Client)

    def put(self, key: str, data: bytes, **conditions: Any) -> Any:
        return self._sent(lambda: self.bare.put(key, data, **conditions), changes=True)

    def delete(self, key: str) -> Any:
        def delete() -> None:
            self.stage.deleting(key)
            self.bare.delete(key)

        return self._sent(delete, changes=True)

    def get(self, key: str) -> Any:
        return self._sent(lambda: self.bare.get(key))

    def get_range(self, key: str, *, start: int, length: int) -> Any:
        return self._sent(lambda: self.bare.get_range(key, start=start, length=length))

    def head(self, key: str) -> Any:
        return self._sent(lambda: self.bare.head(key))

    def list(self, prefix: str | None = None) -> Any:
        return self._sent(lambda: iter([list(itertools.chain.from_iterable(self.bare.list(prefix)))]))

    def list_with_delimiter(self, prefix: str | None = None) -> Any:
        return self._sent(lambda: self.bare.list_with_delimiter(prefix))

    def _sent(self, carry_out: Callable[[], Any], *, changes: bool = False) -> Any:
        if self.stage.turn(changes):
            with contextlib.suppress(Exception):  # the answer is lost, whatever it said
                carry_out()
        return carry_out()


class _Upload:
    """What is uploaded, until it is one request."""

    def __init__(self, client: Client, key: str) -> None:
        self._client, self._key, self._content = client, key, b""

    def write(self, data: memoryview) -> None:
        self._content += data

    def close(self) -> None:
        self._client.put(self._key, self._content)
