"""`lastgood chaos run`, `faults` and `plans`: their options, and exit codes.

Ray prints to descriptor 1 from several places. So with --json the real standard output is set aside for the report.
"""

import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chaos.verdict import counts, exit_code
from workers.errors import EnvironmentProblem

_CONNECT_SECONDS = 10.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(run)
    app.command()(faults)
    app.command()(plans)


def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan's YAML file, or the name of a ready one.")],
    script: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The loop to attack.  [default: one of ours]")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster, e.g. auto.  [default: a local one]")
    ] = None,
    storage: Annotated[
        Path | None, typer.Option(help="Directory for the runs.  [default: a new one in the temporary directory]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the plan's.", min=0)] = None,
    kills: Annotated[
        int | None, typer.Option(help="How many faults, instead of the plan's; steps in proportion.", min=0)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps, instead of the plan's.", min=2)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and all else to stderr.")] = False,
) -> None:
    """Attack a supervised run as a plan says, demand that it finishes, and judge what it left.

    Exits with 0 if all guarantees held, 3 if one of safety is broken, 4 if the run never recovered, 2 for a plan that
    cannot work, 5 if this environment cannot run it.
    """
    from chaos.campaign.driver import load_loop
    from chaos.campaign.plan import load_plan
    from chaos.campaign.runner import Campaign, run_campaign, with_overrides
    from chaos.report import run_timeline, write_report

    loaded = with_overrides(load_plan(plan), kills=kills, steps=steps)
    if script is not None:
        load_loop(script)  # what is wrong with it is told before a cluster is started
    used_seed = loaded.seed if seed is None else seed
    root = _storage(storage)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    say(f"seed {used_seed}: {loaded.title}, in {root}")
    with _only_report_on_stdout(), _cluster(address, loaded.job.ranks) as found:
        campaign = Campaign(plan=loaded, seed=used_seed, storage=root, address=found, script=script, say=say)
        verdicts = run_campaign(campaign)
    page = write_report(
        root / "report",
        title=f"{loaded.title}, seed {used_seed}",
        command=f"lastgood {shlex.join(sys.argv[1:])}{'' if seed is not None else f' --seed {used_seed}'}",
        seed=used_seed,
        verdicts=verdicts,
        timelines=[run_timeline(campaign.run_dir, "the attacked run")],
    )
    say(f"the report is {page}")
    if as_json:
        content = {
            "plan": loaded.name,
            "seed": used_seed,
            "run_dir": str(campaign.run_dir),
            "report": str(page),
            "seconds": round(time.monotonic() - began, 1),
            "counts": counts(verdicts),
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(content, indent=2))
    else:
        from chaos.judge.table import print_verdicts

        print_verdicts(f"{loaded.title}, seed {used_seed}: {campaign.run_dir}", verdicts)
    raise typer.Exit(exit_code(verdicts))


def faults(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the faults that plans may name, and whether each can be done on this machine."""
    from chaos.faults.registry import ARMED, FAULTS

    rows = [
        {
            "name": fault.name,
            "description": fault.description,
            "needs": fault.needs,
            "in": where,
            "unavailable": fault.available(),
        }
        for where, known in (("mix", FAULTS), ("armed", ARMED))
        for fault in known.values()
    ]
    if as_json:
        print(json.dumps({"faults": rows}, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("fault", no_wrap=True), "what happens", "here")
    for row in rows:
        needs = "" if row["needs"] == "nothing" else f" (needs {row['needs']})"
        table.add_row(
            row["name"], f"{row['description']}{needs}", f"no: {row['unavailable']}" if row["unavailable"] else "yes"
        )
    Console(highlight=False).print(table)


def plans(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the plans that come with lastgood."""
    from chaos.campaign.plan import parse_plan, ready_plans

    titles = {name: parse_plan(text, name).title for name, text in ready_plans().items()}
    if as_json:
        print(json.dumps({"plans": [{"name": name, "title": title} for name, title in titles.items()]}, indent=2))
        return
    for name, title in titles.items():
        print(f"{name:<14}  {title}")


def _storage(storage: Path | None) -> Path:
    """A directory of its own for this campaign's runs."""
    if storage is None:
        return Path(tempfile.mkdtemp(prefix="lastgood-chaos-"))
    try:
        root = storage.resolve() / time.strftime("%Y%m%d-%H%M%S")
        root.mkdir(parents=True)
        return root
    except OSError as error:
        raise EnvironmentProblem(f"{storage} cannot be written ({error.strerror}); choose another --storage") from None


@contextmanager
def _cluster(address: str | None, ranks: int) -> Iterator[str]:
    """Connected to that cluster, or to one of our own; yields the address for drivers."""
    import logging

    import ray

    if address is None:
        ray.init(
            address="local",
            num_cpus=max(ranks, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    else:
        _require_listener(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EnvironmentProblem(f"there is no Ray cluster at {address}: {error}") from None
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Ray itself tries for many minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return  # "auto", or a client's address
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentProblem(f"there is no Ray cluster at {address}: {error}") from None


@contextmanager
def _only_report_on_stdout() -> Iterator[None]:
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)
