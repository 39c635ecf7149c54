"""Exceptions for errors that a user can fix.

Invariants:
- Every message gives the value, the rule and the next step.
- The command line prints each of them as one message without a traceback.
"""

import errno
from collections.abc import Sequence
from typing import NamedTuple

from llmsys.log import redact_secrets

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
    """An error that a user can fix. Printed as one message without the secrets of URLs, exit
    status 2.
    """

    def __str__(self) -> str:
        """Return the message."""
        return redact_secrets(super().__str__())

    exit_status = 2


class ConfigError(LlmsysError):
    """A configuration that cannot be read or does not make sense."""


class UntrustedCodeError(ConfigError):
    """Code that a config names and that the user has not consented to. The command line adds the
    command that gives consent.
    """


class DataError(LlmsysError):
    """Input, document or token data that is missing, damaged or different from its manifest."""


class FormatError(DataError):
    """A dataset or a run folder of another format version. The message names the version that
    reads it.
    """


class LockedFolderError(DataError):
    """A folder that another process is writing."""


class LayoutError(LlmsysError):
    """A parallel layout that does not multiply out or does not fit the model."""


class CheckpointError(LlmsysError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint that the system cannot read now. Its bytes may be intact."""


class CheckpointFormatError(UnreadableCheckpointError):
    """A checkpoint of another format version. The message names the version that reads it."""


class LaunchError(LlmsysError):
    """A run that cannot be started or lost one of its processes."""


class RefutedStepError(LlmsysError):
    """A step that a dry run could not take to its end. Exit status 1, as of every dry run that
    proves something wrong.
    """

    exit_status = 1


class LostRankError(LaunchError):
    """A run that lost a process or a host. The same command resumes it. Exit status 3."""

    exit_status = 3


class StopRequested(LlmsysError):  # noqa: N818  # being asked to stop is no error
    """A run that was asked to end before its last step and has saved. The same command resumes
    it. Exit status 75.
    """

    exit_status = 75


def to_data_error(error: OSError) -> DataError | None:
    """Return the DataError for a full, read-only or forbidden disk, or a removed working directory.

    Args:
        error: The error of the system.

    Returns:
        The error with the next step. None when the cause is neither in `DISK_ERRORS` nor the
        working directory.
    """
    # only os.getcwd() names no file
    if error.errno == errno.ENOENT and error.filename is None:
        return DataError(
            "the working directory was removed. Change to a folder that exists, such as with: cd ~"
        )
    if error.errno not in DISK_ERRORS:
        return None
    return DataError(
        f"{error.filename or 'a file'} could not be read or written: {error.strerror}. Free "
        "space, correct the permissions, or name another folder; then run the same command again "
        "to continue."
    )


# Packages that a plain `pip install llmsys` leaves out, and the extra that has them.
EXTRAS = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "sacrebleu": "train",
    "safetensors": "train",
    "scipy": "fit",
    "torch": "train",
}


def to_missing_package_error(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the ConfigError for a package that an extra installs.

    Args:
        error: The error of an import.

    Returns:
        The error with the command that installs it. None for a module that no extra has.
    """
    package = (error.name or "").partition(".")[0]
    return build_missing_package_error(package) if package in EXTRAS else None


def build_missing_package_error(package: str) -> ConfigError:
    """Return the error that a package is not installed.

    Args:
        package: One of `EXTRAS`.

    Returns:
        The error with the command that installs it.
    """
    return ConfigError(
        f"this needs the package {package}, which is not installed. Install it with: pip install "
        f"'llmsys[{EXTRAS[package]}]'"
    )


def format_choices(values: Sequence[object]) -> str:
    """Format values for a message: `1, 2, 3 or 6`.

    Args:
        values: at least one value.

    Returns:
        The values joined by commas and a final `or`.
    """
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


class Violation(NamedTuple):
    """One broken constraint: the key inside the section (dotted if nested) and a message with
    the fix.
    """

    key: str
    message: str
