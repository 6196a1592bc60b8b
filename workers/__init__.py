"""What runs next to the training: the loop's session, the ranks, their agents and keepers, state and checkpoints.

Importing this package imports neither torch nor Ray: agents and keepers need the first never, ranks the second rarely.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.session import Session

__all__ = ["get_session"]


def get_session() -> "Session":
    """The session of the supervised training loop that is running in this process.

    Raises CallerError outside such a loop.
    """
    from workers.session import current_session

    return current_session()
