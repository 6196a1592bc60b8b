"""Markup that cannot be broken by what is put into it.

`h("td", text)` makes an element. Whatever is not `Html` already is escaped, so text from a run (a rank's error, the
name of a directory) stays text whatever it holds: tags, quotes, control characters, halves of surrogate pairs, marks
that turn the direction of writing around. Only this module makes `Html` of strings.
"""

import html
from collections.abc import Iterable

from orchestrator.observe import words

_VOID = frozenset({"meta", "br", "col", "line", "rect", "circle", "path", "polyline"})


class Html(str):
    """Markup. Made by the functions of this module, never of a run's text."""

    __slots__ = ()


def h(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Children: Html as it is, other values as escaped text, None and False are left out, iterables of
    those in turn. Attributes: `class_` is class, `_` in a name is `-`; None and False are left out, True is an
    empty value."""
    inner = join(children)
    opening = f"<{name}{''.join(_attributes(attributes))}"
    return Html(f"{opening}/>" if name in _VOID and not inner else f"{opening}>{inner}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Children, one after the other."""
    return Html("".join(_flat(children)))


def text(value: object) -> Html:
    """Escaped; what cannot be seen, or turns other text around, becomes a replacement character."""
    return Html(html.escape(words.visible(str(value))))


def _flat(children: Iterable[object]) -> Iterable[str]:
    for child in children:
        if isinstance(child, Html):
            yield child
        elif child is None or child is False:
            continue
        elif isinstance(child, Iterable) and not isinstance(child, str | bytes):
            yield from _flat(child)
        else:
            yield text(child)


def _attributes(attributes: dict[str, object]) -> Iterable[str]:
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            yield f' {name}=""'
        elif value is not None and value is not False:
            yield f' {name}="{text(value)}"'
