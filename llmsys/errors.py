"""The errors a person can cause and mend; every message says the value, the rule and the next step.

Reads nothing, gives the exception types that all rooms raise, and promises that the command line prints each of them
as one message without a traceback.
"""


class LlmsysError(Exception):
    """Anything a user can mend: printed as one message, exit status 2."""


class ConfigError(LlmsysError):
    """A configuration that cannot be read or does not make sense."""


class DataError(LlmsysError):
    """Input, document or token data that is missing, damaged or not what its manifest says."""


class LayoutError(LlmsysError):
    """A parallel layout that does not multiply out or does not fit the model."""


class CheckpointError(LlmsysError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class LaunchError(LlmsysError):
    """A run that cannot be started or lost one of its processes."""
