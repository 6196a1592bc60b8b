"""What an object store owes when the power goes at its clients, and all that it may do beyond that.

Owed: what a request did is durable once the request was answered; an object is there whole or not at all; a request
with a condition takes effect only where that holds when it is carried out. The store itself never loses power.

Not owed: a request that was sent and not answered has been carried out, or has not, or is carried out later, when
other processes have long gone on, even if the one that sent it is gone. So it stays possible for good, and may take
effect after anything that was answered since. Parts of an upload that was not completed are seen by nobody.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chaos.crash_states.enumerate import State, Tree, digest_of
from chaos.crash_states.ops import Mark

Bucket = Mapping[str, bytes]
"""Key to content."""


@dataclass(frozen=True, slots=True)
class Put:
    """One object's content. `condition`: "absent", that there is none yet; "same", that it is still `replaced`."""

    key: str
    data: bytes
    condition: Literal["none", "absent", "same"] = "none"
    replaced: bytes = b""


@dataclass(frozen=True, slots=True)
class Delete:
    """One object is gone, if there was one."""

    key: str


Request = Put | Delete


@dataclass(frozen=True, slots=True)
class Sent:
    """A request is on its way, under a number of its own."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Answered:
    """It was carried out before anything that follows."""

    number: int


Event = Sent | Answered | Mark


@dataclass(frozen=True, slots=True)
class Moment:
    """The power may go now: after `operations` events, the last of which was `last`. What was answered has led to
    `bucket`; `under_way`: what was not, in the order in which it was sent."""

    operations: int
    last: Event | None
    bucket: Bucket
    under_way: tuple[Request, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for moments that allow the same states."""
        return frozenset(self.bucket.items()), self.under_way


class RequestLog:
    """The events so far, of all processes."""

    def __init__(self) -> None:
        self.ops: list[Event] = []
        self._numbers = itertools.count()
        self._ids = itertools.count(1)

    def mark(self, kind: str, **facts: Any) -> None:
        """Something that is no request happened."""
        self.ops.append(Mark(kind, facts))

    def next_id(self) -> int:
        """Another number each time."""
        return next(self._ids)

    def send(self, requests: Sequence[Request]) -> list[int]:
        """They are on their way; returns their numbers."""
        numbers = [next(self._numbers) for _ in requests]
        self.ops += map(Sent, numbers, requests)
        return numbers

    def answer(self, numbers: Sequence[int]) -> None:
        """They are carried out."""
        self.ops += map(Answered, numbers)


@dataclass(slots=True)
class _Course:
    bucket: dict[str, bytes] = field(default_factory=dict)
    under_way: dict[int, Request] = field(default_factory=dict)


def moments(events: Iterable[Event]) -> Iterator[Moment]:
    """Before the first event, and after each."""
    course = _Course()
    yield Moment(0, None, {}, ())
    for operations, event in enumerate(events, start=1):
        match event:
            case Sent():
                course.under_way[event.number] = event.request
            case Answered():
                carry_out(course.under_way.pop(event.number), course.bucket)
        yield Moment(operations, event, dict(course.bucket), tuple(course.under_way.values()))


def carry_out(request: Request, bucket: dict[str, bytes]) -> None:
    """Change the bucket as the request does, if its condition holds."""
    match request:
        case Delete():
            bucket.pop(request.key, None)
        case Put(condition="absent") if request.key in bucket:
            pass
        case Put(condition="same") if bucket.get(request.key) != request.replaced:
            pass
        case Put():
            bucket[request.key] = request.data


def all_states(moment: Moment) -> Iterator[State]:
    """Each once: every subset of what was not answered, in every order where that matters, which is for equal keys."""
    seen: set[bytes] = set()
    by_key: dict[str, list[Request]] = {}
    for request in moment.under_way:
        by_key.setdefault(request.key, []).append(request)
    for chosen in itertools.product(*(_ordered_subsets(requests) for requests in by_key.values())):
        state = _state(moment, itertools.chain.from_iterable(chosen))
        if state.digest not in seen:
            seen.add(state.digest)
            yield state


def describe(event: Event) -> str:
    """For people."""
    match event:
        case Sent(request=Put() as put):
            return f"put {put.key} is sent"
        case Sent(request=request):
            return f"delete {request.key} is sent"
        case Answered():
            return f"request {event.number} is answered"
        case Mark():
            return f"({event.kind})"


def tree_of(bucket: Bucket) -> Tree:
    """Keys as paths."""
    tree: dict[str, Any] = {}
    for key, content in sorted(bucket.items()):
        *folders, name = key.split("/")
        below = tree
        for folder in folders:
            below = below.setdefault(folder, {})
        below[name] = content
    return tree


def _state(moment: Moment, requests: Iterable[Request]) -> State:
    bucket = dict(moment.bucket)
    for request in requests:
        carry_out(request, bucket)
    tree = tree_of(bucket)
    return State(tree, digest_of(tree))


def _ordered_subsets(requests: Sequence[Request]) -> Iterator[tuple[Request, ...]]:
    for size in range(len(requests) + 1):
        yield from itertools.permutations(requests, size)
