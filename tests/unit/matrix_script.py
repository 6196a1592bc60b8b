"""Tries cells of the kill matrix, on production code that is broken on purpose, for test_kill_matrix.py.

Usage: matrix_script.py OUT SABOTAGE CELL [SABOTAGE CELL]... It forks, so it is a process of its own, with one thread.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.matrix.cells import all_cells
from chaos.matrix.runner import _warm_up, chosen


def bytes_after_the_commit() -> None:
    """A shard gets its name and its receipt first, and its bytes once the manifest is there."""
    from workers import failpoint, keeper
    from workers.checkpoint import persist

    def early(store: Any, path: str, image: memoryview, image_bytes: int, *, context: Any) -> None:
        file = store.open_new(path)
        content = bytes(image[:image_bytes])

        def write() -> None:
            deadline = time.monotonic() + 30
            while not store.exists(f"{path.rpartition('/')[0]}/manifest.json") and time.monotonic() < deadline:
                time.sleep(0.001)
            tear = lambda: file.write_at(memoryview(content)[: len(content) // 2], 0)  # noqa: E731
            failpoint.hit("persist.block", tear, index=0, total=1, **context)
            file.write_at(memoryview(content), 0)

        threading.Thread(target=write, daemon=True).start()

    def unread(*arguments: Any, **options: Any) -> Any:
        return persist.write_shard(*arguments, **{**options, "read_back": None})

    persist.persist = early
    keeper.write_shard = unread


def newest_is_passed_over() -> None:
    """The ladder never sees the newest checkpoint."""
    from orchestrator.decide import ladder

    real = ladder.choose

    def choose(*, checkpoints: Any, **options: Any) -> Any:
        known = sorted(checkpoints, key=lambda one: (one.generation, one.step))
        return real(checkpoints=known[:-1], **options)

    ladder.choose = choose


def retention_keeps_one() -> None:
    """Whatever keep_last says."""
    from orchestrator.decide import retention

    real = retention.expired

    def expired(**options: Any) -> Any:
        return real(**{**options, "keep_last": 1})

    retention.expired = expired


def other_bytes_are_restored() -> None:
    """One tensor is a little off after each restore."""
    from workers.checkpoint.reader import CheckpointReader

    real = CheckpointReader.fill

    def fill(self: CheckpointReader, wanted: Any) -> None:
        wanted = list(wanted)
        real(self, wanted)
        for name, _, tensor in wanted:
            if name.startswith("model.") and tensor.is_floating_point():
                tensor.add_(1e-3)

    CheckpointReader.fill = fill  # type: ignore[method-assign]


def no_points() -> None:
    """Nothing is ever injected."""
    from workers import failpoint

    failpoint.hit = lambda *arguments, **context: None


SABOTAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "bytes-after-the-commit": bytes_after_the_commit,
    "newest-is-passed-over": newest_is_passed_over,
    "retention-keeps-one": retention_keeps_one,
    "other-bytes-are-restored": other_bytes_are_restored,
    "no-points": no_points,
}


def main() -> None:
    out, *wanted = sys.argv[1:]
    _warm_up()
    from chaos.matrix.trial import try_cell, undisturbed

    verdicts, references = [], {}
    for sabotage, name in zip(wanted[::2], wanted[1::2], strict=True):
        cell = chosen([cell for cell in all_cells() if not cell.impossible], name)[0]
        size = cell.world_size
        if size not in references:
            references[size] = undisturbed(cell, Path(out) / "reference" / str(size), seed=0)
        directory = Path(out) / "cells" / str(len(verdicts))
        verdicts.append(
            try_cell(cell, directory, seed=0, reference=references[size], replay="", sabotage=SABOTAGES[sabotage])
        )
    (Path(out) / "verdicts.json").write_text(json.dumps([asdict(verdict) for verdict in verdicts]))


if __name__ == "__main__":
    main()
