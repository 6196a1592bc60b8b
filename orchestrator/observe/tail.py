"""Reads a ledger that grows: each call gives the entries that have come since the last one."""

from pathlib import Path
from typing import Any

from orchestrator.observe.ledger import entries_in


class Tail:
    """Of the ledger at `path`, which need not exist yet. A line that is still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def exists(self) -> bool:
        return self.path.is_file()

    def read(self) -> list[dict[str, Any]]:
        """Whole entries since the last call; FileNotFoundError if there is no ledger."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(entries_in(whole.splitlines()))
