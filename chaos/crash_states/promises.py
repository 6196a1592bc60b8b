"""What a run had been promised when the power went: read from the marks among the operations."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from chaos.crash_states.ops import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What recovery owes from here on.

    acceptable: names of checkpoints of which one has to be chosen: the newest whose commit has returned on the
    lineage, or one that came after it. fresh: nothing was ever committed, so a fresh start is right. kept: committed,
    and retention has not begun to delete them. generation: the highest that was created. recorded: sequence numbers of
    lines of the ledger that are to be durable.
    """

    acceptable: frozenset[str] = frozenset()
    fresh: bool = True
    kept: frozenset[str] = frozenset()
    generation: int = 0
    recorded: frozenset[int] = frozenset()

    def after(self, mark: Mark) -> "Promise":
        """What it is when this has happened too."""
        facts = mark.facts
        match mark.kind:
            case "commit begins":
                return replace(self, acceptable=self.acceptable | {facts["name"]})
            case "committed":
                name = frozenset({facts["name"]})
                return replace(self, acceptable=name, fresh=False, kept=self.kept | name)
            case "delete begins":
                return replace(self, kept=self.kept - {facts["name"]})
            case "generation begins" if facts["parent"] is not None:
                return replace(self, acceptable=self.acceptable | {facts["parent"]})
            case "generation created":
                return replace(self, generation=max(self.generation, facts["number"]))
            case "generation begun" if facts["parent"] is not None:
                # From here on the lineage goes through its parent, and what came after that is rolled back.
                return replace(self, acceptable=frozenset({facts["parent"]}), fresh=False)
            case "recorded":
                return replace(self, recorded=self.recorded | {facts["seq"]})
        return self


def promises(ops: Iterable[object]) -> list[Promise]:
    """Before the first operation, and after each."""
    found = [Promise()]
    for op in ops:
        found.append(found[-1].after(op) if isinstance(op, Mark) else found[-1])
    return found
