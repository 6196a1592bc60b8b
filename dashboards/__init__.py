"""Grafana dashboards, Prometheus rules and an example configuration, and the command that copies them out.

The files are what this package is about; `build` writes the dashboards (it needs grafana-foundation-sdk, of the extra
"dev"), and a test holds that they are up to date. Rules are written by hand.
"""

from importlib.resources import files
from pathlib import Path

FILES = (
    "prometheus.yml",
    "rules/recording.yml",
    "rules/alerts.yml",
    "grafana/lastgood-overview.json",
    "grafana/lastgood-deep-dive.json",
    "grafana/provisioning/dashboards/lastgood.yml",
    "grafana/provisioning/datasources/lastgood.yml",
)
"""All that is exported, by path."""


def read(name: str) -> str:
    """One of the files."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def export(directory: Path, *, replace: bool) -> list[Path]:
    """Write all files below the directory. Raises FileExistsError, before anything is written, if one is there already
    with another content and `replace` is False."""
    targets = {directory / name: read(name) for name in FILES}
    for path, text in targets.items():
        if not replace and path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(path)
    for path, text in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(targets)
