"""Guarantees about what is kept: nothing that counts is lost, and retention leaves what it must."""

from chaos.history import History, checkpoint_record
from chaos.judge.guarantee import Guarantee
from chaos.judge.terms import Terms
from chaos.verdict import Verdict
from orchestrator.decide.lineage import eligible

NEVER_LOST = Guarantee(
    name="never lost",
    promise="what was committed on the run's lineage stays until retention replaces it by newer checkpoints",
)
RETENTION_FLOOR = Guarantee(
    name="retention floor",
    promise="no checkpoint on the lineage is deleted before enough newer ones are committed",
)
_DISK_FULL = "the disk is full"


def never_lost(history: History, terms: Terms) -> Verdict:
    """Each commit on the final lineage is still there, or the ledger says that retention removed it, or a fault did."""
    commits = {entry["checkpoint"]: entry for entry in history.entries("commit")}
    counting = eligible(history.generations, [checkpoint_record(name) for name in commits])
    gone = history.deletions()
    violations = [
        f"checkpoints/{record.name}, committed in ledger {commits[record.name]['seq']}, is gone"
        for record in counting
        if not history.has_manifest(record.name) and record.name not in gone and not history.touched(record.name)
    ]
    replaced = sum(record.name in gone for record in counting)
    return NEVER_LOST.judged(
        violations, f"{len(counting)} commits on the lineage, {replaced} replaced since", commits=len(counting)
    )


def retention_floor(history: History, terms: Terms) -> Verdict:
    """At each deletion, as many newer committed checkpoints are left as the run was to keep."""
    violations, deletions = [], 0
    left: set[str] = set()
    unrecorded = history.unrecorded_commits()
    set_aside: set[str] = set()
    highest = 0
    for entry in history.ledger:
        match entry["kind"]:
            case "generation":
                highest = max(highest, entry["generation"])
            case "commit":
                left.add(entry["checkpoint"])
                # Saves are committed in their order, so what a killed coordinator did not record came before this one.
                newest = _age(entry["checkpoint"])
                left |= {name for name in unrecorded if _age(name) < newest}
            case "quarantine":
                set_aside.add(entry["checkpoint"])
            case "deleted" if entry["checkpoint"] in left:
                deletions += 1
                name = entry["checkpoint"]
                known = [record for record in history.generations if record.number <= highest]
                on_lineage = eligible(known, [checkpoint_record(one) for one in left if one not in set_aside])
                names = [record.name for record in on_lineage]
                floor = terms.keep_last_min if _DISK_FULL in entry["reason"] else terms.keep_last
                if name in names[:floor]:
                    violations.append(
                        f"{name} was deleted with {names.index(name)} newer ones there, not {floor} "
                        f"(ledger {entry['seq']})"
                    )
                left.discard(name)
                unrecorded.discard(name)
    return RETENTION_FLOOR.judged(
        violations, f"{deletions} deletions, {terms.keep_last} to be kept", deletions=deletions
    )


def _age(name: str) -> tuple[int, int]:
    record = checkpoint_record(name)
    return record.generation, record.step
