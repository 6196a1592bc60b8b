"""A rank's document as it stands in the header: JSON within a JSON string, in ASCII.

For a model of many tensors the document is large, and nearly all of it stays the same from save to save. What does is
marked, and turned into text once.
"""

import json
from typing import Any

from workers.errors import StateNotStorable

_LEVELS = 3  # how deep a marked part lies in a document: parts, name, state


class Unchanging(dict[str, Any]):
    """An object of a document that nobody changes after it was made; a new state gets a new one."""

    __slots__ = ("_text",)

    def text(self) -> str:
        try:
            return self._text
        except AttributeError:
            self._text: str = _text(self)
            return self._text


def to_bytes(document: dict[str, Any]) -> bytes:
    """Also text that is not valid Unicode comes back. Raises StateNotStorable if a value is not JSON."""
    try:
        return f'"{_assembled(document, _LEVELS)}"'.encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise StateNotStorable(f"the document of this rank is not JSON: {error}") from None


def _assembled(value: Any, levels: int) -> str:
    if isinstance(value, Unchanging):
        return value.text()
    if levels and type(value) is dict and all(type(key) is str for key in value):
        members = (f"{_text(key)}:{_assembled(item, levels - 1)}" for key, item in value.items())
        return f"{{{','.join(members)}}}"
    return _text(value)


def _text(value: Any) -> str:
    """JSON, escaped to stand in a JSON string."""
    return json.dumps(json.dumps(value, separators=(",", ":"), allow_nan=False))[1:-1]
