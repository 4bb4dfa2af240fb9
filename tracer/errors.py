"""The one family of errors that lifetrace raises for what a person can mend."""


class LifetraceError(Exception):
    """Something a user can act on; the message names the object, the cause and the remedy."""

    exit_code = 2


class UsageError(LifetraceError):
    """A setting that cannot be: a value out of range, a file that is not there."""


class ModelError(LifetraceError):
    """A model or tokenizer that cannot be loaded, or that lifetrace does not trace."""


class TraceError(LifetraceError):
    """A trace folder that cannot be read or written."""


class RunError(LifetraceError):
    """A run that began and could not be finished: no memory left, disk full."""

    exit_code = 1


class Interrupted(RunError):
    """A run that the user ended; what was to come after it does not begin."""
