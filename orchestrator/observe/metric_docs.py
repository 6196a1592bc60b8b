"""Writes docs/metrics.md from the table of metrics: `python -m orchestrator.observe.metric_docs`."""

from pathlib import Path

from orchestrator.observe.accounting import GOOGLE_NAMES, KINDS
from orchestrator.observe.metric_table import GROUPS, LABELS, RANKS_SHOWN_MAX
from orchestrator.observe.tally import DETECTION_BUCKETS, RECOVERY_BUCKETS, SAVE_BUCKETS

_HEAD = """# Metrics

*Written from `orchestrator/observe/metric_table.py` by
`python -m orchestrator.observe.metric_docs`: change them there.*

Each run's coordinator answers on HTTP, by default on this machine alone and at a port that is free
(`RecoveryConfig(metrics_port=..., metrics_host=...)`; `metrics_port=None` turns it off). `lastgood status RUN_DIR` says
where, and so does `RUN_DIR/prometheus.json`, which Prometheus reads by `file_sd_configs`. There is no authentication:
whoever reaches the port can read it.

| path | answer |
|---|---|
| `/metrics` | all below, as Prometheus reads it |
| `/healthz` | 200 if the run is protected, and gets on or has finished; else 503. The body says why, as JSON |
| `/` | the status page; `/main`: what changes of it; `/state.json`: the same for scripts ([status.md](status.md)) |

All metrics have the label `run`, the name of the run directory. Counters are made from the run's ledger, so a
restarted coordinator, or the next driver, goes on with them. What is not known before the ranks were heard of is
left out until then (*live*).

Those marked *Ray* are also reported through `ray.util.metrics`: Prometheus that scrapes the Ray cluster sees them,
without more set-up, with `ray_` in front of their names. Ray exports metrics only where `ray[default]` is installed.
"""

_CAUSES = """Causes are those of the ledger; `driver` is one that was gone, so that the next one began at a
checkpoint, and `other` one that this version does not know.

## Kinds of time

Each moment since the run began is in one kind, so that they add up. The names in capitals are the categories of
Google's ML Goodput Measurement that fit best.
"""

_WHEN = """
Lost steps are counted when they are done again: training is productive while it does what was not done before. Counters
hold what no later entry of the ledger changes: while a run trains they are up to 45 s old, while it starts or recovers
they wait until that is over. Ratios count what goes on now too.
"""


def text() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group, metrics in GROUPS.items():
        parts.append(f"## {group}\n\n| name | type | labels | meaning |\n|---|---|---|---|")
        for metric in metrics:
            marks = "".join(f" *{mark}.*" for mark, holds in (("Live", metric.live), ("Ray", metric.ray)) if holds)
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.help}{marks} |")
        parts.append("")
    parts.append("## Labels\n\n| label | values |\n|---|---|")
    parts += [f"| `{label}` | {', '.join(f'`{value}`' for value in values)} |" for label, values in LABELS.items()]
    parts.append(f"| `rank` | at most {RANKS_SHOWN_MAX} ranks at a time, those with the highest values |\n")
    parts.append(_CAUSES)
    parts.append("| `kind` | meaning | Google's |\n|---|---|---|")
    parts += [f"| `{kind}` | {meaning} | `{GOOGLE_NAMES[kind]}` |" for kind, meaning in KINDS.items()]
    parts.append(_WHEN)
    parts.append("## Buckets\n\n| histogram | upper bounds, in seconds |\n|---|---|")
    for name, bounds in (
        ("lastgood_detection_seconds", DETECTION_BUCKETS),
        ("lastgood_recovery_seconds", RECOVERY_BUCKETS),
        ("lastgood_save_*_seconds", SAVE_BUCKETS),
    ):
        parts.append(f"| `{name}` | {', '.join(f'{bound:g}' for bound in bounds)} |")
    return "\n".join(parts) + "\n"


def main() -> None:
    Path(__file__).parents[2].joinpath("docs", "metrics.md").write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
