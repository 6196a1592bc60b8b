"""Errors, grouped by whose fault they are.

The class says who has to act: the caller (a wrong argument, an object that cannot be stored), the environment (a full
disk, a missing permission), or the data on disk (a checkpoint that fails verification). Each message is one sentence
that says what, where, and what to do. The command line maps a class to its exit code.
"""

from typing import ClassVar


class LastgoodError(Exception):
    """Base of every error that lastgood raises on purpose."""

    exit_code: ClassVar[int] = 1


class CallerError(LastgoodError):
    """The caller passed or did something that cannot work; nothing was changed."""

    exit_code = 2


class StateNotStorable(CallerError):
    """A tracked object holds a value that no checkpoint can hold; the message names its key."""


class EnvironmentProblem(LastgoodError):
    """The machine, the cluster or the storage does not offer what the run needs."""

    exit_code = 5


class Fenced(EnvironmentProblem):
    """Another driver has taken over the run; this one may not touch it any more."""


class GuaranteeBroken(LastgoodError):
    """Something that lastgood promises does not hold; never ignored, never retried in silence."""

    exit_code = 3


class CheckpointDamaged(GuaranteeBroken):
    """A checkpoint's bytes are not what was committed (missing, short, or another digest)."""


class NothingVerifies(GuaranteeBroken):
    """Checkpoints exist, but none of them can be trusted; starting afresh would lose the run in silence."""


class ResumeMismatch(GuaranteeBroken):
    """The state after a restore would not continue the run that was saved; the message lists the fields."""


class TrainingFailed(LastgoodError):
    """The training loop failed and the failure budget is spent; the message ends with the user's own traceback."""


class TrainingDiverged(TrainingFailed):
    """A loss or gradient norm is not finite, or explodes; the message names the step and its batches."""
