"""`lastgood checkpoints`: what is in a run directory, and whether it is what was committed.

Reads only, so that it is safe beside a running training. Needs neither Ray nor torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from orchestrator.archive import RunArchive, ScanResult
from orchestrator.cli.progress import byte_progress
from orchestrator.decide.lineage import CheckpointRecord, eligible
from orchestrator.observe.ledger import LEDGER_FILE, begun_generations, committed_checkpoints, read_ledger
from orchestrator.run_store import checkpoint_storage_of, store_of
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.place import open_store
from workers.checkpoint.verify import Problem, verify_checkpoint
from workers.errors import CallerError, GuaranteeBroken

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run: storage_path/name.")]
Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="A checkpoint's name, step-000000120-g0007-a01.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_WIDTH_ELSEWHERE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One save attempt as `list` shows it.

    status: "newest" (what a restart would restore), "older" (before it on the lineage), "rolled back" (not on the
    lineage), "quarantined", "damaged", "missing", or "unfinished" (never committed); `reason` explains the bad ones.
    """

    name: str
    step: int
    generation: int
    attempt: int
    status: str
    reason: str | None
    bytes: int | None
    world_size: int | None
    created_at: float | None
    verified_from: list[str]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="List, show and verify the checkpoints of a run.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("list")(list_checkpoints)
    group.command("show")(show)
    group.command("verify")(verify)
    app.add_typer(group, name="checkpoints")


def list_checkpoints(run_dir: RunDir, as_json: Json = False) -> None:
    """List all save attempts, newest first, and which one a restart would restore."""
    rows = _rows(_scan(run_dir))
    if as_json:
        _print_json({"run_dir": str(run_dir), "checkpoints": [asdict(row) for row in rows]})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("checkpoint", no_wrap=True)
    for column in ("step", "generation", "MB"):
        table.add_column(column, justify="right")
    for column in ("created", "read back from", "status"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.name,
            str(row.step),
            str(row.generation),
            "" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
            "" if row.created_at is None else _time(row.created_at),
            ", ".join(row.verified_from),
            row.status + (f": {row.reason}" if row.reason else ""),
        )
    _console().print(table)


def show(run_dir: RunDir, name: Name = None, as_json: Json = False) -> None:
    """Show one checkpoint: its shards, tensors and progress; by default the one that a restart would restore."""
    scan = _scan(run_dir)
    rows = _rows(scan)
    name = name or next((row.name for row in rows if row.status == "newest"), None)
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        raise CallerError(
            f"{run_dir} has no checkpoint {name or 'to restore'}; see `lastgood checkpoints list {run_dir}`"
        )
    manifest = next((manifest for manifest in scan.manifests if manifest.name == name), None)
    if manifest is None:
        raise GuaranteeBroken(f"{row.name} cannot be shown, it is {row.status}: {row.reason or 'it has no manifest'}")
    if as_json:
        _print_json({"status": row.status, "reason": row.reason, **asdict(manifest)})
        return
    console = _console()
    console.print(f"{row.name}  ({row.status})")
    for label, value in _facts(manifest, row).items():
        console.print(f"  {label:<10} {value}", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("shard", "tensor", "dtype", "shape", "at", "of"):
        table.add_column(column, no_wrap=True)
    for shard in manifest.shards:
        for tensor in shard.tensors:
            table.add_row(
                str(shard.rank),
                tensor.name,
                tensor.dtype,
                _shape(tensor.shape),
                _shape(tensor.offsets),
                _shape(tensor.global_shape),
            )
    console.print(table)


def verify(run_dir: RunDir, name: Name = None, as_json: Json = False) -> None:
    """Read every byte of all committed checkpoints, or of one, and compare it with what was committed.

    Exits with 3 if anything differs, and names the tensor.
    """
    scan = _scan(run_dir)
    names = [row.name for row in _rows(scan) if row.status != "unfinished" and name in (None, row.name)]
    if not names:
        raise CallerError(f"{run_dir} has no committed checkpoint{f' {name}' if name else ''}")
    store = store_of(run_dir)
    found: dict[str, list[Problem]] = {}
    console = _console()
    sizes = {row.name: row.bytes or 0 for row in _rows(scan)}
    with byte_progress(sum(sizes[checked] for checked in names)) as told:
        for checked in names:
            found[checked] = verify_checkpoint(store, checked, told)
            if not as_json:
                _print_verdict(console, checked, found[checked], scan.quarantined)
    if as_json:
        checkpoints = [
            {"name": checked, "ok": not problems, "problems": [asdict(problem) for problem in problems]}
            for checked, problems in found.items()
        ]
        _print_json({"run_dir": str(run_dir), "ok": not any(found.values()), "checkpoints": checkpoints})
    if any(found.values()):
        raise typer.Exit(GuaranteeBroken.exit_code)


def _scan(run_dir: Path) -> ScanResult:
    elsewhere = checkpoint_storage_of(run_dir)
    if not elsewhere and not (run_dir / "generations").is_dir() and not (run_dir / "checkpoints").is_dir():
        raise CallerError(f"{run_dir} is not the directory of a run: it has neither generations/ nor checkpoints/")
    ledger = run_dir / LEDGER_FILE
    entries = read_ledger(ledger) if ledger.exists() else []
    archive = RunArchive(open_store(run_dir, elsewhere))
    return archive.scan(committed_checkpoints(entries), begun=begun_generations(entries), fresh=False)


def _rows(scan: ScanResult) -> list[Row]:
    on_lineage = eligible(scan.generations, scan.checkpoints)
    good = [record.name for record in on_lineage if record.name not in scan.rejected]
    manifests = {manifest.name: manifest for manifest in scan.manifests}

    def row(record: CheckpointRecord) -> Row:
        manifest = manifests.get(record.name)
        reason = scan.rejected.get(record.name)
        if record in scan.vanished:
            status, reason = "missing", "its directory is gone, though it was committed"
        elif record in scan.orphans:
            status = "unfinished"
        elif record.name in scan.quarantined:
            status = "quarantined"
        elif record.name in scan.problems:
            status = "damaged"
        elif record.name not in good:
            status = "rolled back"
        else:
            status = "newest" if record.name == good[0] else "older"
        return Row(
            name=record.name,
            step=record.step,
            generation=record.generation,
            attempt=record.attempt,
            status=status,
            reason=reason,
            bytes=manifest.total_bytes if manifest else None,
            world_size=manifest.world_size if manifest else None,
            created_at=manifest.created_at if manifest else None,
            verified_from=_verified_from(manifest) if manifest else [],
        )

    records = sorted(
        (*scan.checkpoints, *scan.orphans, *scan.vanished),
        key=lambda rec: (rec.generation, rec.step, rec.attempt),
        reverse=True,
    )
    return [row(record) for record in records]


def _facts(manifest: Manifest, row: Row) -> dict[str, str]:
    progress = ", ".join(f"{key} {value}" for key, value in manifest.progress.items())
    return {
        "run": manifest.run,
        "progress": progress,
        "created": _time(manifest.created_at),
        "size": f"{manifest.total_bytes / 1e6:.1f} MB in {len(manifest.shards)} shards",
        "read back": _read_back(manifest),
        **({"reason": row.reason} if row.reason else {}),
    }


def _print_verdict(console: Console, name: str, problems: Sequence[Problem], quarantined: Mapping[str, str]) -> None:
    note = f"  (quarantined: {quarantined[name]})" if name in quarantined else ""
    console.print(f"{name}  {'DAMAGED' if problems else 'ok'}{note}", markup=False)
    for problem in problems:
        where = f"{problem.file}: tensor {problem.tensor}" if problem.tensor else problem.file
        console.print(f"  {where}: {problem.reason}", markup=False)


def _verified_from(manifest: Manifest) -> list[str]:
    return sorted({shard.verified_from for shard in manifest.shards})


def _read_back(manifest: Manifest) -> str:
    found = _verified_from(manifest)
    return f"from {', '.join(found)}" + (", digests equal" if found != ["nothing"] else ": verify_saves was off")


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "-"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _console() -> Console:
    """Folds columns to fit a terminal, and nothing elsewhere: other programs read whole lines."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=_WIDTH_ELSEWHERE)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))
