"""Reading a mapping of settings: each error names the field, its value and what it has to be."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from workers.errors import CallerError


class Fields:
    """The settings of one section. Every field is taken by a method of its kind; `close` refuses what is left."""

    def __init__(self, content: object, where: str, *, of: str) -> None:
        self._where, self._of = where, of
        if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
            raise CallerError(f"{of}: {where or 'a plan'} is {content!r}; it has to be a mapping of fields to values")
        self._left: dict[str, Any] = dict(content)
        self._known: list[str] = []

    def section(self, name: str) -> "Fields":
        """A mapping within; an empty one if it is absent."""
        return Fields(self._take(name, {}), self._path(name), of=self._of)

    def whole(self, name: str, default: int, *, least: int) -> int:
        value = self._take(name, default)
        return int(self._checked(name, value, _is_whole(value) and value >= least, f"a whole number, at least {least}"))

    def whole_or_none(self, name: str, *, least: int) -> int | None:
        value = self._take(name, None)
        good = value is None or (_is_whole(value) and value >= least)
        self._checked(name, value, good, f"a whole number, at least {least}, or left out")
        return value if value is None else int(value)

    def number(self, name: str, default: float, *, least: float = 0.0, most: float = math.inf) -> float:
        value = self._take(name, default)
        wanted = f"a number, at least {least:g}" + ("" if math.isinf(most) else f" and at most {most:g}")
        return float(self._checked(name, value, _is_number(value) and least <= value <= most, wanted))

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name, default)
        return bool(self._checked(name, value, isinstance(value, bool), "true or false"))

    def text(self, name: str, default: str) -> str:
        value = self._take(name, default)
        return str(self._checked(name, value, isinstance(value, str) and bool(value.strip()), "a text"))

    def choice(self, name: str, default: str, among: Collection[str]) -> str:
        value = self._take(name, default)
        return str(self._checked(name, value, value in among, f"one of {', '.join(among)}"))

    def weights(self, name: str, among: Collection[str], default: Mapping[str, float]) -> dict[str, float]:
        """Names of `among` to numbers of which at least one is above 0."""
        value = self._take(name, dict(default))
        good = isinstance(value, Mapping) and all(_is_number(one) and one >= 0 for one in value.values())
        good = good and (not value or sum(value.values()) > 0)
        self._checked(name, value, good, "a mapping of names to weights, numbers of at least 0, not all of them 0")
        if unknown := [str(one) for one in value if one not in among]:
            raise CallerError(
                f"{self._of}: {self._path(name)} names {', '.join(unknown)}; it has to name only {', '.join(among)}"
            )
        return {str(one): float(weight) for one, weight in value.items()}

    def names(self, name: str, among: Collection[str], default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._take(name, list(default))
        good = isinstance(value, list) and bool(value) and all(one in among for one in value)
        return tuple(self._checked(name, value, good, f"a list of some of {', '.join(among)}"))

    def numbers(self, name: str, *, count: int | None = None) -> tuple[float, ...] | None:
        """A list of numbers above or equal to 0, ascending if it is a pair; None if it is absent."""
        value = self._take(name, None)
        if value is None:
            return None
        good = isinstance(value, list) and bool(value) and all(_is_number(one) and one >= 0 for one in value)
        wanted = "a list of numbers, each at least 0"
        if count == 2:
            wanted = "a list of two numbers, the least and the most"
            good = good and len(value) == 2 and value[0] <= value[1]
        return tuple(float(one) for one in self._checked(name, value, good, wanted))

    def mapping(self, name: str) -> dict[str, Any]:
        """Of any content."""
        value = self._take(name, {})
        good = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return dict(self._checked(name, value, good, "a mapping of names to values"))

    def refuse(self, name: str, value: object, wanted: str) -> CallerError:
        return CallerError(f"{self._of}: {self._path(name)} is {value!r}; it has to be {wanted}")

    def close(self) -> None:
        if self._left:
            names = ", ".join(self._path(name) for name in sorted(self._left))
            raise CallerError(f"{self._of}: {names} is no field of a plan; there are {', '.join(sorted(self._known))}")

    def _take(self, name: str, default: object) -> Any:
        self._known.append(name)
        value = self._left.pop(name, default)
        return default if value is None else value

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def _checked(self, name: str, value: Any, good: bool, wanted: str) -> Any:
        if not good:
            raise self.refuse(name, value, wanted)
        return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
