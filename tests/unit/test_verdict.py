"""What a list of verdicts comes to."""

import pytest

from chaos.verdict import Outcome, Verdict, counts, exit_code


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((), 0),
        ((Outcome.HELD, Outcome.SKIPPED), 0),
        ((Outcome.HELD, Outcome.UNRECOVERED), 4),
        ((Outcome.UNRECOVERED, Outcome.BROKEN, Outcome.HELD), 3),
    ],
)
def test_the_worst_outcome_decides_the_exit_code(outcomes: tuple[Outcome, ...], code: int) -> None:
    assert exit_code(Verdict(name=str(index), outcome=one) for index, one in enumerate(outcomes)) == code


def test_every_outcome_is_counted_also_one_that_did_not_happen() -> None:
    held = Verdict(name="a", outcome=Outcome.HELD)
    assert counts([held, held]) == {"held": 2, "broken": 0, "unrecovered": 0, "skipped": 0}
