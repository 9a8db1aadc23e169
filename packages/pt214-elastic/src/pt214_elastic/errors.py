"""What pt214-elastic raises: one small tree under :class:`ElasticError`.

``Repeat`` stands outside it and is a ``BaseException``: a user's ``except RuntimeError`` around
a step, for out-of-memory say, must not eat the order to repeat that step.
"""


class ElasticError(RuntimeError):
    """Base of every error of this package."""


class OptionError(ElasticError, ValueError):
    """An option's name or value is not one we know."""


class WireError(ElasticError):
    """Bytes on the coordinator's channel are not an authentic frame."""


class StoreInterrupted(ElasticError):
    """A blocked store call ended because a rank of its epoch was lost."""


class RankLost(ElasticError):
    """A rank was lost and ``on_fault="raise"`` asks to hear of it."""


class JobFailed(ElasticError):
    """The job cannot go on: too few ranks, or nobody holds the state."""


class ReformFailed(ElasticError):
    """The process group could not be changed in place; the next record may say otherwise."""


class LoopError(ElasticError):
    """The training loop broke a rule that exactly-once steps need."""


class StateError(ElasticError):
    """A tracked object cannot be copied, or a received copy does not fit."""


class JobOver(SystemExit):
    """The job ended while this process still waited to enter it: leave quietly."""

    def __init__(self) -> None:
        super().__init__(0)


class Repeat(BaseException):
    """This step's work was undone by a fault; the loop hands the same step out again."""
