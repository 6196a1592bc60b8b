"""Small plots as text, and figures in a file for those who have matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from workers.errors import CallerError, EnvironmentProblem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_SUFFIXES = (".png", ".svg")
_WIDTH_ELSEWHERE = 1000  # other programs read whole lines
_FILLS = "█▓▒░·x"


def text_console() -> Console:
    """Standard output, without marking up what is printed."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if console.is_terminal:
        return console
    return Console(highlight=False, markup=False, soft_wrap=True, width=_WIDTH_ELSEWHERE)


def legend(kinds: Sequence[str]) -> str:
    """What the parts of a bar stand for."""
    return "  ".join(f"{fill} {kind}" for fill, kind in zip(_FILLS, kinds, strict=False))


def bar(parts: Sequence[float], whole: float, width: int) -> str:
    """Parts of a whole side by side; as a row of `width` characters if they fill it. Each end is where it belongs, so
    that what is lost to rounding does not add up."""
    text, total = "", 0.0
    for fill, part in zip(_FILLS, parts, strict=False):
        total += part
        end = round(width * min(1.0, total / whole)) if whole else 0
        text += fill * (end - len(text))
    return text


def require_figure(path: Path) -> None:
    """Raise what is wrong with writing a figure there, before anything is computed for it."""
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise CallerError(f"--plot is {str(path)!r}; it has to be a file that ends in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise CallerError(f"--plot is {str(path)!r}; its directory has to exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        problem = f"--plot needs matplotlib, and it cannot be imported ({error})"
        raise EnvironmentProblem(f"{problem}; install it: pip install 'lastgood[plot]'") from None


@contextmanager
def figure(path: Path) -> Iterator["Axes"]:
    """Axes to draw on; written to the file at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(drawn)
    yield drawn.subplots()
    try:
        drawn.savefig(path, dpi=150)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path} ({error.strerror}); choose another file with --plot") from None


def stacked(axes: "Axes", labels: Sequence[str], parts: Sequence[Mapping[str, float]]) -> None:
    """A horizontal bar for each label, the first on top, made up of the same kinds of parts, in percent."""
    left = [0.0] * len(labels)
    for kind in parts[0] if parts else ():
        widths = [100.0 * one[kind] for one in parts]
        if any(widths):
            axes.barh(range(len(labels)), widths, left=left, label=kind)
            left = [one + width for one, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.legend()
