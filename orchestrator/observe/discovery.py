"""Where a run's exporter is: the ledger's last `exporter` entry says so, and a file that Prometheus reads.

`prometheus.json` in the run directory is a target list for Prometheus' file_sd_configs. It is there while a driver
is; one that was killed leaves it behind, so that Prometheus sees a target that does not answer, which is what happened.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("lastgood")

TARGETS_FILE = "prometheus.json"
_DRIVER = "__lastgood_driver"
"""Prometheus drops labels with such names once it has read the file."""


def announce(run_dir: Path, target: str, driver: str) -> None:
    """`target`: host:port. In the place of what an earlier driver, or coordinator, left behind: Prometheus would go on
    asking that one, and LastgoodExporterDown be said of a run that trains. Raises OSError."""
    groups = [{"targets": [target], "labels": {_DRIVER: driver}}]
    fresh = run_dir / f".{TARGETS_FILE}.{driver}"
    fresh.write_bytes(json.dumps(groups).encode() + b"\n")
    fresh.replace(run_dir / TARGETS_FILE)


def withdraw(run_dir: Path, driver: str) -> None:
    """The run of this driver is over; another one's target stays."""
    path = run_dir / TARGETS_FILE
    try:
        if json.loads(path.read_bytes())[0]["labels"][_DRIVER] == driver:
            path.unlink()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("lastgood: %s could not be removed: %s", path, error)


def last_exporter(entries: Iterable[Mapping[str, Any]], driver: str | None = None) -> Mapping[str, Any] | None:
    """The newest `exporter` entry of this driver, or of the newest one."""
    found: Mapping[str, Any] | None = None
    for entry in entries:
        if entry["kind"] == "exporter" and driver in (None, entry["driver"]):
            found = entry
        elif entry["kind"] == "coordinator" and driver is None and not entry["resumed"]:
            found = None
    return found


def exporter_url(entry: Mapping[str, Any]) -> str | None:
    """Where metrics are, by an `exporter` entry; None if they are nowhere."""
    host = entry["host"]
    return f"http://{f'[{host}]' if ':' in host else host}:{entry['port']}/metrics" if entry["port"] else None
