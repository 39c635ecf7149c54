"""The errors a person can cause and mend; every message says the value, the rule and the next step.

Reads nothing, gives the exception types that all rooms raise, and promises that the command line prints each of them
as one message without a traceback. `to_data_error` says which of the system's own errors a person can mend too.
"""

import errno

from llmsys.redact import redact_secrets

DISK_ERRORS = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENOTDIR,
        errno.EISDIR,
    )
)


class LlmsysError(Exception):
    """Anything a user can mend: printed as one message, exit status 2; without the secrets of URLs in it."""

    def __str__(self) -> str:
        """Return the message."""
        return redact_secrets(super().__str__())

    exit_status = 2


class ConfigError(LlmsysError):
    """A configuration that cannot be read or does not make sense."""


class DataError(LlmsysError):
    """Input, document or token data that is missing, damaged or not what its manifest says."""


class LayoutError(LlmsysError):
    """A parallel layout that does not multiply out or does not fit the model."""


class CheckpointError(LlmsysError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint that the system cannot read now, which says nothing about its bytes."""


class LaunchError(LlmsysError):
    """A run that cannot be started or lost one of its processes."""


class LostRankError(LaunchError):
    """A run that lost a process or a host: the same command resumes it. Exit status 3."""

    exit_status = 3


class StopRequested(LlmsysError):  # noqa: N818  # being asked to stop is no error
    """A run that was asked to end before its last step, and has saved: the same command continues it. Status 75."""

    exit_status = 75


def to_data_error(error: OSError) -> DataError | None:
    """What a person can do about a full, read-only or forbidden place on disk; None for any other failure."""
    if error.errno not in DISK_ERRORS:
        return None
    return DataError(
        f"{error.filename or 'a file'} could not be read or written: {error.strerror}. Free space, mend the "
        f"permissions, or name another folder; then run the same command again: it continues where it stopped."
    )
