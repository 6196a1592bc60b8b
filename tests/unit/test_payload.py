"""The loop on its way to the ranks."""

import threading
import traceback

import cloudpickle
import pytest

from orchestrator.payload import pickle_loop
from workers.errors import CallerError


def test_a_traceback_of_a_loop_that_was_sent_by_value_names_its_file_and_shows_its_line() -> None:
    def loop(config: dict[str, int]) -> None:
        def inner() -> None:
            raise ZeroDivisionError(config["x"])

        inner()

    sent, config = cloudpickle.loads(pickle_loop(loop, {"x": 1}))
    assert sent is not loop
    with pytest.raises(ZeroDivisionError) as raised:
        sent(config)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count(f'File "{__file__}"') >= 3
    assert 'raise ZeroDivisionError(config["x"])' in text


def test_what_cannot_be_sent_is_refused_with_the_remedy() -> None:
    with pytest.raises(CallerError, match="it has to be a function"):
        pickle_loop(3, None)
    with pytest.raises(CallerError, match="create such objects inside the loop"):
        pickle_loop(lambda: None, {"lock": threading.Lock()})
