"""What watching a run costs: the coordinator's work for the ledger and the exporter, and a scrape of many ranks.

No Ray and no training: pulses of simulated ranks are given to the coordinator's own `Observation`, entries to a real
ledger on disk, and scrapes go over HTTP. Nothing of it is in the ranks' step path; what is compared with a step is the
CPU time that it takes on the node where the coordinator runs.

- watching: CPU seconds for each second of a run with 2 ranks and 100 steps/s: two pulses a rank, a save every 10 s with
  its entries, `progress`, and a scrape every 15 s. Goal: below a thousandth.
- scrape: from the request until all is read, with 1,024 ranks and a ledger with 1,000 failures. Goal: 19 of 20 in less
  than 50 ms, on a machine that has a core to spare.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from made_up_run import MadeUpRun
from observation_samples import eventful_run, observe, pulse

from orchestrator.observation import Observation

SHARE_MAX = 1e-3
SCRAPE_SECONDS_MAX = 0.05
SCRAPE_EVERY_SECONDS = 15
SAVE_EVERY_SECONDS = 10
PULSES_PER_SECOND = 2


def cpu_seconds(work: Callable[[], object], times: int) -> float:
    """Of one call, all threads counted."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def observation(directory: Path, ranks: int, failures: int) -> tuple[MadeUpRun, Observation]:
    run = eventful_run(ranks)
    for _ in range(failures):
        run.fail()
        run.begin(run.step - 5, "memory")
        run.first_step()
        run.train(60)
        run.commit()
    watching = observe(run, directory)
    for rank in range(ranks):
        watching.pulse(rank, pulse(run, rank))
        watching.uses_memory(rank, 10**9 + rank)
    watching.waits(dict.fromkeys(range(ranks), 0.001))
    return run, watching


def watching_share(directory: Path) -> dict[str, float]:
    """CPU seconds by what they went into, for each second of training."""
    run, watching = observation(directory, 2, 0)
    one = pulse(run)
    watching._written_at = run.now
    entry = {key: value for key, value in run.entries[-2].items() if key not in ("v", "seq", "at", "kind")}
    per_pulse = cpu_seconds(lambda: watching.pulse(0, one), 5000)
    per_entry = cpu_seconds(lambda: watching._ledger.append("progress", **entry), 300)
    per_durable = cpu_seconds(lambda: watching._ledger.append("deleted", checkpoint="c", reason="r"), 30)
    watching.start()
    assert watching._server is not None
    url = f"http://{watching._server.target}/metrics"
    per_scrape = cpu_seconds(lambda: urllib.request.urlopen(url).read(), 50)
    return {
        "pulses": per_pulse * 2 * PULSES_PER_SECOND,
        "ledger": (per_entry + 2 * per_durable) / SAVE_EVERY_SECONDS + per_entry / 45,
        "scrapes": per_scrape / SCRAPE_EVERY_SECONDS,
    }


def scrape_seconds(directory: Path, ranks: int, failures: int, times: int) -> tuple[list[float], int]:
    """How long each scrape took, and how many bytes it is."""
    _, watching = observation(directory, ranks, failures)
    watching.start()
    assert watching._server is not None
    took, size = [], 0
    for _ in range(times):
        began = time.perf_counter()
        size = len(urllib.request.urlopen(f"http://{watching._server.target}/metrics").read())
        took.append(time.perf_counter() - began)
    return took, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--failures", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    Observation._report_through_ray = lambda self: None  # type: ignore[method-assign]  # there is no Ray to report to
    with tempfile.TemporaryDirectory() as directory:
        shares = watching_share(Path(directory, "small"))
        took, size = scrape_seconds(Path(directory, "large"), asked.ranks, asked.failures, asked.scrapes)
    share = sum(shares.values())
    slow = statistics.quantiles(took, n=20)[-1]
    met = share < SHARE_MAX and slow < SCRAPE_SECONDS_MAX
    if asked.json:
        print(json.dumps({"watching": shares, "scrape_seconds": took, "scrape_bytes": size, "met": met}))
    else:
        for name, seconds in shares.items():
            print(f"watching 2 ranks: {name:<8} {100 * seconds:.4f} % of a core")
        print(f"watching 2 ranks: all      {100 * share:.4f} % of a core; goal below {100 * SHARE_MAX:.1f} %")
        print(
            f"scrape of {asked.ranks} ranks: median {1e3 * statistics.median(took):.1f} ms, 95th percentile "
            f"{1e3 * slow:.1f} ms, {size} bytes; goal below {1e3 * SCRAPE_SECONDS_MAX:.0f} ms"
        )
        print("met" if met else "MISSED")
    sys.exit(not met)


if __name__ == "__main__":
    main()
