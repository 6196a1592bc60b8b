"""Writes the three files of a report. One that is there is replaced, whole or not at all."""

import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.report.junit import junit_xml
from chaos.report.page import page_html
from chaos.report.timeline import Timeline
from chaos.verdict import Verdict, counts
from workers.errors import EnvironmentProblem

FORMAT_VERSION = 1
JSON_FILE = "report.json"
JUNIT_FILE = "junit.xml"
HTML_FILE = "report.html"


def report_dir(out: Path | None, kind: str) -> Path:
    """Where a report of this kind goes: `out`, as given with --out, or a new temporary directory.

    Raises EnvironmentProblem if nothing can be written there: better now than after hours.
    """
    if out is None:
        return Path(tempfile.mkdtemp(prefix=f"lastgood-{kind}-"))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out.resolve()
    except OSError as error:
        raise EnvironmentProblem(f"--out: {out} cannot be written ({error.strerror}); choose another one") from None


def write_report(
    directory: Path,
    *,
    title: str,
    command: str,
    seed: int,
    verdicts: Iterable[Verdict],
    timelines: Iterable[Timeline] = (),
    created_at: float | None = None,
) -> Path:
    """Write report.json, junit.xml and report.html into `directory`, which is made if need be; returns the page's path.

    `command` is the command line that does all of this again, `seed` the seed it was run with. `created_at` is in Unix
    seconds; now, if it is not given.
    """
    verdicts, timelines = tuple(verdicts), tuple(timelines)
    created_at = time.time() if created_at is None else created_at
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "format_version": FORMAT_VERSION,
        "title": title,
        "command": command,
        "seed": seed,
        "created_at": created_at,
        "counts": counts(verdicts),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "timelines": [asdict(timeline) for timeline in timelines],
    }
    _replace(directory / JSON_FILE, json.dumps(_plain(document), indent=1, allow_nan=False))
    _replace(directory / JUNIT_FILE, junit_xml(title=title, command=command, seed=seed, verdicts=verdicts))
    page = page_html(
        title=title, command=command, seed=seed, verdicts=verdicts, timelines=timelines, created_at=created_at
    )
    _replace(directory / HTML_FILE, page)
    return directory / HTML_FILE


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # File names that are no text reach reports as lone surrogates, which cannot be encoded as they are.
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    """With values that JSON does not have as strings: hours of work are not to be lost to one of them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
