"""Configure and get the loggers of a run, and redact secrets in everything that is printed or
written to a file.

Reads: RANK and WORLD_SIZE from the environment, never torch.

Invariants:
- The result of `redact_secrets` holds no password of a URL, no token or signature of its query, no
  value assigned to a variable with a secret name, and no key of a known shape.
- Redacting twice changes nothing more.
"""

import io
import logging
import os
import re
import sys
from typing import Any, TextIO


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module.

    Args:
        name: `__name__` of the module.

    Returns:
        The logger. It prints nothing before `configure_logging` was called.
    """
    return logging.getLogger(name)


def allow_every_character() -> None:
    """Print a character that the terminal cannot encode as its escape, instead of ending with an
    error. Each program calls it first.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def can_show_escapes(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that moves its cursor and knows bold letters.

    Args:
        stream: The output.

    Returns:
        False for files and pipes, and where TERM is dumb.
    """
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def configure_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all log lines to one stream. Each entry point calls it once.

    With several ranks, each line names its rank. A second call replaces the first.

    Args:
        level: The level of rank 0. Other ranks log warnings and errors only.
        stream: The output. None means standard error.
    """
    rank, world_size = _read_rank_and_world_size()
    handler = _LineHandler(stream)
    handler.setFormatter(
        logging.Formatter(f"[rank {rank}] %(message)s" if world_size > 1 else "%(message)s")
    )
    root = logging.getLogger()
    for previous in [handler for handler in root.handlers if isinstance(handler, _LineHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    # Other packages log their warnings only.
    root.setLevel(logging.WARNING)
    own_level = level if rank == 0 else max(level, logging.WARNING)
    for package in ("llmsys", "data_pipeline", "launch"):
        logging.getLogger(package).setLevel(own_level)


def _read_rank_and_world_size() -> tuple[int, int]:
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


class _LineHandler(logging.Handler):
    """A handler that writes one line and clears a progress bar first."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = self._stream or sys.stderr
        try:
            line = redact_secrets(self.format(record))
            if record.levelno >= logging.WARNING:
                line = f"{record.levelname.lower()}: {line}"
            bar_library = sys.modules.get("tqdm")  # imported only where a bar was drawn
            if bar_library is not None:
                bar_library.tqdm.write(line, file=stream)
            else:
                stream.write(line + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


REDACTED = "REDACTED"

# Words that make a name secret wherever they occur in it.
_SECRET_WORDS = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|ACCESSKEY|KEYS?$", re.IGNORECASE
)
# Words that make a name secret only as a whole part of it: PATH is not PAT.
_SECRET_PARTS = frozenset(
    (
        *(
            "auth",
            "authorization",
            "bearer",
            "cookie",
            "cookies",
            "dsn",
            "jwt",
            "key",
            "keys",
            "pass",
            "passcode",
        ),
        *("pat", "pats", "pwd", "sas", "sig", "signature"),
    )
)
_PART_BORDER = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*)://(?P<rest>[^\s'\"<>`]+)", re.IGNORECASE)
_USER = re.compile(r"[^/?#]*@")
_PARAMETER = re.compile(r"(?P<name>[?&;#][^=&;#?]+)=(?P<value>[^&;#]*)")
_SECRET_PARAMETERS = frozenset(["policy", "googleaccessid", "awsaccesskeyid"])
# Azure writes container@account, which is no secret.
_CONTAINER_SCHEMES = frozenset(("abfs", "abfss", "wasb", "wasbs", "az", "adl"))
_ASSIGNMENT = re.compile(
    r"(?<![\w.])(?P<name>[A-Z][A-Z0-9_]+)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;'\"\]]+)"
)
_PLURAL_TOKENS = re.compile(r"TOKENS$|TOKENIZERS?(?=_|$)")
_SHAPES = re.compile(
    r"(?<![\w\-])(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}"
    r"|sk-[\w\-]{20,}|xox[abprs]-[\w\-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w\-]{30,}"
    r"|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]+)"
)


def is_secret_name(name: str) -> bool:
    """Return True when a name is that of a secret.

    Args:
        name: The name of a variable or query parameter.

    Returns:
        True for API_KEY and password, False for PATH.
    """
    parts = {part.lower() for part in _PART_BORDER.split(name)}
    return bool(_SECRET_WORDS.search(name) or parts & _SECRET_PARTS)


def has_secret(text: str) -> bool:
    """Return True when `redact_secrets` would change a text.

    Args:
        text: Any text.

    Returns:
        True when a secret was found.
    """
    return redact_secrets(text) != text


def redact_secrets(text: str) -> str:
    """Replace every secret in a text.

    Args:
        text: Any text.

    Returns:
        The text with `REDACTED` instead of each secret.
    """
    if "://" in text:
        text = _URL.sub(lambda found: redact_url(found.group()), text)
    if "=" in text:
        text = _ASSIGNMENT.sub(_redact_assignment, text)
    return _SHAPES.sub(REDACTED, text)


def redact_url(url: str) -> str:
    """Replace the secrets in a URL.

    Args:
        url: The URL.

    Returns:
        The URL without user information and without secret values in query and fragment.
    """
    scheme, separator, rest = url.partition("://")
    if "://" in rest:  # fsspec chains protocols, and a query may hold another address
        inner = rest.rindex("://")
        begin = len(re.sub(r"[A-Za-z][A-Za-z0-9+.\-]*$", "", rest[:inner]))
        rest = rest[:begin] + redact_url(rest[begin:])
    user = _USER.match(rest)
    if user is not None and (
        ":" in user.group() or scheme.lower() not in _CONTAINER_SCHEMES | {"ssh", "sftp"}
    ):
        rest = f"{REDACTED}@{rest[user.end() :]}"
    return scheme + separator + _PARAMETER.sub(_redact_parameter, rest)


def redact_values(value: Any) -> Any:
    """Replace the secrets in plain data.

    Args:
        value: Nested mappings, lists, tuples and scalars.

    Returns:
        A copy with redacted texts. Tuples become lists. Keys stay.
    """
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, dict):
        return {key: redact_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(one) for one in value]
    return value


def _redact_parameter(found: re.Match[str]) -> str:
    name = found["name"][1:]
    secret = is_secret_name(name) or name.lower() in _SECRET_PARAMETERS
    return f"{found['name']}={REDACTED}" if secret and found["value"] else found.group()


def _redact_assignment(found: re.Match[str]) -> str:
    # MAX_TOKENS=512 and TOKENIZERS_PARALLELISM=false are settings
    name = _PLURAL_TOKENS.sub("", found["name"])
    return f"{found['name']}={REDACTED}" if is_secret_name(name) else found.group()
