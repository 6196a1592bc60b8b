"""The command line finds its commands, stays light, and turns an error's class into the exit code."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli import app as cli
from workers.errors import CallerError, EnvironmentProblem, GuaranteeBroken, LastgoodError, NothingVerifies


def test_version_is_the_installed_one() -> None:
    result = CliRunner().invoke(cli.build_app(), ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"lastgood {version('lastgood')}\n")


def test_commands_of_packages_above_are_found() -> None:
    help_text = CliRunner().invoke(cli.build_app(), ["--help"]).stdout
    assert {"advise", "checkpoints", "demo", "simulate"} <= set(help_text.split())


def test_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli.build_app(), ["no-such-command"]).exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CallerError("no such run"), 2),
        (GuaranteeBroken("a shard is damaged"), 3),
        (NothingVerifies("none of 2"), 3),
        (EnvironmentProblem("no disk"), 5),
    ],
)
def test_deliberate_error_becomes_one_line_and_its_exit_code(
    error: LastgoodError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "build_app", lambda: app)
    monkeypatch.setattr(sys, "argv", ["lastgood"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == code
    assert capsys.readouterr().err == f"lastgood: {error}\n"


def test_listing_commands_imports_nothing_that_is_slow_or_starts_threads() -> None:
    script = (
        "import sys; from orchestrator.cli.app import build_app; build_app(); "
        "print(sorted({'torch', 'ray', 'numpy', 'pyarrow'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--workers", "1"], ["--kill-at", "persist.nowhere"]])
def test_demo_refuses_wrong_usage_before_it_starts_anything(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.build_app(), ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
