"""Reads fields of TOML tables; each mistake is an error that names the field, its value and what would be right."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from chaos.simulator.draws import Cost
from orchestrator.cli.durations import parse_duration
from orchestrator.doctor.sizes import parse_size
from workers.errors import CallerError

T = TypeVar("T")
MISSING: Any = object()


class Table:
    """`where`: what the table is called in errors. Fields that nobody has asked for are mistakes: see `done`."""

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.where = where
        self._left = dict(content)

    def duration(self, name: str, default: float = MISSING, *, zero: bool = False) -> float:
        return self._read(name, default, lambda value, field: _duration(value, field, zero))

    def durations(self, name: str, *, zero: bool = False) -> tuple[float, ...]:
        """Of a list with at least one."""

        def read(value: Any, field: str) -> tuple[float, ...]:
            if not isinstance(value, list) or not value:
                raise _wrong(field, value, "a list of durations, such as ['2h', '20min']")
            return tuple(_duration(one, f"{field}[{number}]", zero) for number, one in enumerate(value))

        return self._read(name, MISSING, read)

    def cost(self, name: str, default: Cost = MISSING) -> Cost:
        """A duration, or a table with `mean` and `variation`, or with `seen`, a list of durations."""

        def read(value: Any, field: str) -> Cost:
            if not isinstance(value, dict):
                return Cost(mean_seconds=_duration(value, field, zero=True))
            table = Table(value, field)
            if "seen" in value:
                cost = Cost(seen=table.durations("seen", zero=True))
            else:
                mean = table.duration("mean", zero=True)
                cost = Cost(mean_seconds=mean, variation=table.number("variation", 0.0, least=0.0))
            table.done()
            return cost

        return self._read(name, default, read)

    def size(self, name: str, default: int) -> int:
        return self._read(name, default, lambda value, field: parse_size(str(value), field=field))

    def number(self, name: str, default: float = MISSING, *, least: float, most: float | None = None) -> float:
        """Whole or not; `least` itself is too little if it is what nothing can be divided by."""

        def read(value: Any, field: str) -> float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (least <= value if most is None else least <= value <= most):
                between = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
                raise _wrong(field, value, f"a number {between}")
            return float(value)

        return self._read(name, default, read)

    def count(self, name: str, default: T = MISSING, *, least: int = 1) -> int | T:
        def read(value: Any, field: str) -> int:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _wrong(field, value, f"a whole number, at least {least}")
            return value

        return self._read(name, default, read)

    def flag(self, name: str, default: bool) -> bool:
        def read(value: Any, field: str) -> bool:
            if not isinstance(value, bool):
                raise _wrong(field, value, "true or false")
            return value

        return self._read(name, default, read)

    def text(self, name: str, default: str = MISSING, *, among: Sequence[str] = ()) -> str:
        def read(value: Any, field: str) -> str:
            if not isinstance(value, str) or (among and value not in among):
                raise _wrong(field, value, f"one of {', '.join(among)}" if among else "text")
            return value

        return self._read(name, default, read)

    def texts(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        def read(value: Any, field: str) -> tuple[str, ...]:
            if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
                raise _wrong(field, value, "a list of texts")
            return tuple(value)

        return self._read(name, default, read)

    def table(self, name: str) -> "Table | None":
        """None if there is none of that name."""

        def read(value: Any, field: str) -> Table:
            if not isinstance(value, dict):
                raise _wrong(field, value, f"a table, [{name}]")
            return Table(value, field)

        return self._read(name, None, read)

    def tables(self, name: str) -> "tuple[Table, ...]":
        """Of an array of tables with at least one."""

        def read(value: Any, field: str) -> tuple[Table, ...]:
            if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
                raise _wrong(field, value, f"tables, each headed by [[{name}]]")
            return tuple(Table(one, f"{field}[{number}]") for number, one in enumerate(value))

        return self._read(name, MISSING, read)

    def done(self) -> None:
        """Nothing more is expected here."""
        for name, value in self._left.items():
            raise CallerError(f"{self._field(name)} is {value!r}; there is no such field, see docs/cadence.md")

    def _field(self, name: str) -> str:
        return f"{self.where}.{name}"

    def _read(self, name: str, default: Any, read: Callable[[Any, str], T]) -> T:
        if name in self._left:
            return read(self._left.pop(name), self._field(name))
        if default is MISSING:
            raise CallerError(f"{self._field(name)} is missing; docs/cadence.md says what it means")
        return default  # type: ignore[no-any-return]


def _duration(value: Any, field: str, zero: bool) -> float:
    return parse_duration(str(value), field=field, zero=zero)


def _wrong(field: str, value: Any, wanted: str) -> CallerError:
    return CallerError(f"{field} is {value!r}; it has to be {wanted}")
