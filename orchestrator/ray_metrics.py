"""Run-level metrics through Ray's own exporter, so that a cluster's existing scrape sees them, as `ray_lastgood_...`.

Only the coordinator reports, so that there is one truth; and all of it every few seconds, since Ray drops what it has
not heard of for a while. Counters are left to our own exporter: Ray adds up what each process counts, and goes on
showing those of processes that are gone.
"""

from collections.abc import Sequence

from ray.util.metrics import Gauge

from orchestrator.observe.metric_table import METRICS
from orchestrator.observe.metrics import Value, View, readings

RAY_METRICS = tuple(metric for metric in METRICS.values() if metric.ray)


class Reporter:
    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def of(self, view: View) -> list[tuple[str, str, Value]]:
        """Name, run and value of what is reported."""
        wanted = {metric.name for metric in RAY_METRICS}
        return [
            (name, view.run, value)
            for short, _, value in readings(view)
            if (name := f"lastgood_{short}") in wanted and isinstance(value, int | float)
        ]

    def report(self, values: Sequence[tuple[str, str, Value]]) -> None:
        for name, run, value in values:
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description=METRICS[name].help, tag_keys=("run",))
            assert isinstance(value, int | float)
            self._gauges[name].set(float(value), tags={"run": run})
