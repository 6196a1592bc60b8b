"""Guarantees about what is restored: nothing torn, nothing unverified, and nothing but the newest."""

from chaos.history import History
from chaos.judge.guarantee import Guarantee
from chaos.judge.terms import Terms
from chaos.verdict import Verdict

NEVER_TORN = Guarantee(
    name="never torn",
    promise="a checkpoint exists once its manifest does, with every byte as it was committed",
)
NOTHING_UNVERIFIED = Guarantee(
    name="nothing unverified restored",
    promise="only what was committed, and is not set aside, is restored",
)
NEWEST_WINS = Guarantee(
    name="newest verified on the lineage wins",
    promise="each restart goes on from the newest verified state on the run's lineage",
)


def never_torn(history: History, terms: Terms) -> Verdict:
    """Every checkpoint that no fault damaged is whole, and no generation trained from damaged bytes."""
    violations = [text for text in history.torn_restores() if "damaged" in text]
    looked_at = 0
    for checkpoint in history.committed:
        if history.touched(checkpoint.name) or not history.has_manifest(checkpoint.name):
            continue
        looked_at += 1
        if problems := history.problems(checkpoint.name):
            where = f"checkpoints/{checkpoint.name}/{problems[0].file}"
            violations.append(f"{where}: {problems[0].reason}, and no fault had touched it")
    return NEVER_TORN.judged(violations, f"{looked_at} checkpoints read, byte for byte", checkpoints=looked_at)


def nothing_unverified(history: History, terms: Terms) -> Verdict:
    """Each restore is of a committed checkpoint that was not in quarantine, or of a set in memory that was not
    dropped."""
    violations = []
    restores = history.entries("restored")
    set_aside = {entry["checkpoint"]: entry["seq"] for entry in reversed(history.entries("quarantine"))}
    dropped = {(entry["generation"], entry["step"]): entry["seq"] for entry in history.entries("memory_dropped")}
    parents = {record.number: record for record in history.generations}
    for restore in restores:
        name, where = restore["checkpoint"], f"(ledger {restore['seq']})"
        if name is not None and not history.was_committed(name, before=restore):
            violations.append(f"rank {restore['rank']} restored {name}, which had not been committed {where}")
        elif name is not None and set_aside.get(name, restore["seq"]) < restore["seq"]:
            violations.append(
                f"rank {restore['rank']} restored {name}, which was quarantined (ledger {set_aside[name]}) {where}"
            )
        elif name is None and (record := parents.get(restore["generation"])) and record.source == "memory":
            seq = dropped.get((record.parent_generation or 0, record.restored_step), restore["seq"])
            if seq < restore["seq"]:
                violations.append(
                    f"rank {restore['rank']} restored step {record.restored_step} from memory, which had been dropped "
                    f"(ledger {seq}) {where}"
                )
    return NOTHING_UNVERIFIED.judged(violations, f"{len(restores)} restores", restores=len(restores))


def newest_wins(history: History, terms: Terms) -> Verdict:
    """No restart goes back further than it has to, and none goes on from a timeline that was left."""
    violations = [*history.stale_restores(), *history.off_lineage_restores()]
    restarts = max(0, len(history.begun()) - 1)
    return NEWEST_WINS.judged(violations, f"{restarts} restarts", restarts=restarts)
