"""The user's loop on its way to the ranks: pickled by value, so that a loop in a script or a notebook travels too."""

import io
import types
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle

from workers.errors import CallerError


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the names of source files, for a traceback without them helps nobody; newer cloudpickles leave them out."""

    @staticmethod
    def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
        make, arguments, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        named = tuple(code.co_filename if one == "<dynamic-code>" else one for one in arguments)
        return (make, named, *rest)

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def pickle_loop(loop: Any, config: dict[str, Any] | None) -> bytes:
    """Raises CallerError if it is no function, or cannot be pickled."""
    if not callable(loop):
        raise CallerError(f"train_loop_per_worker is {loop!r}; it has to be a function")
    try:
        stream = io.BytesIO()
        _Pickler(stream).dump((loop, config))
        return stream.getvalue()
    except Exception as error:
        raise CallerError(
            f"the training loop or train_loop_config cannot be pickled ({type(error).__name__}: {error}); "
            f"create such objects inside the loop"
        ) from error
