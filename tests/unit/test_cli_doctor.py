"""`lastgood doctor` refuses what cannot be meant, before it measures anything."""

import pytest
from typer.testing import CliRunner

from orchestrator.cli import app as cli
from orchestrator.cli import doctor
from workers.errors import CallerError


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(*_: object, **__: object) -> None:
        raise AssertionError("measured before the input was checked")

    monkeypatch.setattr(doctor, "examine", examine)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--state", "100", "--ranks", "8"], "--state is '100'"),
        (["--state", "lots", "--ranks", "8"], "--state is 'lots'"),
        (["--state", "100GB"], "--ranks is missing"),
        (["--state", "100GB", "--ranks", "0"], "--ranks is 0"),
        (["--state", "100GB", "--ranks", "8", "--ranks-per-node", "-1"], "--ranks-per-node is -1"),
        (["--ranks", "8"], "--state is missing"),
        (["--ranks-per-node", "8"], "--state is missing"),
        (["--sample", "1"], "--sample is '1'"),
        (["--sample", "1KiB"], "--sample is '1KiB'"),
        (["--sample", "1TB"], "--sample is '1TB'"),
        (["--storage", "/no/such/directory"], "--storage is '/no/such/directory'"),
        (["--storage", __file__], f"--storage is {__file__!r}"),
    ],
)
def test_wrong_usage_is_refused_with_field_value_and_what_is_right(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(cli.build_app(), ["doctor", *arguments])
    assert isinstance(result.exception, CallerError)
    assert told in str(result.exception)
    assert result.stdout == ""


def test_ranks_that_are_no_number_are_a_usage_error() -> None:
    result = CliRunner().invoke(cli.build_app(), ["doctor", "--state", "1GB", "--ranks", "many"])
    assert result.exit_code == 2
    assert "--ranks" in result.stderr
