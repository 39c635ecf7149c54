"""Consent to Python code that a config names and that is no part of llmsys.

Reads the environment variable `LLMSYS_TRUST_CODE` and the record of the user,
`$XDG_CONFIG_HOME/llmsys/trusted_code` (default `~/.config/llmsys/trusted_code`). Appends to both.

Invariants:
- A file is known by the sha256 of its bytes, as `sha256sum FILE` prints it: one changed byte needs
  a new consent, a copy at another path does not.
- The record has the lines that `sha256sum` writes, so that any process may append to it.
- Code of llmsys needs no consent, wherever a config names it.
- Consent passes to all processes of a command by the variable, which launchers carry to hosts.
"""

import hashlib
import os
import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import llmsys
from llmsys.errors import ConfigError, UntrustedCodeError
from llmsys.log import get_logger

# 1: run any code. record: run any code and record it. Else digests, separated by commas.
VARIABLE = "LLMSYS_TRUST_CODE"
ANY = "1"
RECORDING = "record"
PACKAGE = Path(llmsys.__file__).resolve().parent
_TASK_SUFFIXES = (".py", ".yaml", ".yml")
_DIGEST = re.compile(r"[0-9a-f]{64}")

log = get_logger(__name__)


def trust_code_of_command(environment: MutableMapping[str, str] = os.environ) -> None:
    """Consent to all code that this command and its processes run, and let them record it.

    Args:
        environment: variables to change; by default those of this process.
    """
    environment[VARIABLE] = RECORDING


def compute_file_digest(data: bytes) -> str:
    """Return the sha256 of a file's bytes as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def require_trusted_code(
    files: Sequence[tuple[Path, bytes]],
    key: str,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Check that the user consents to code, before any of it runs.

    Args:
        files: each file with its bytes.
        key: key of the config that names them, such as data.rules.1, for the message.
        environment: variables to read; gets the digests, for processes on other hosts.

    Raises:
        UntrustedCodeError: a file has no consent.
        ConfigError: `LLMSYS_TRUST_CODE` has another value than those it takes.
    """
    consent = environment.get(VARIABLE, "")
    if consent == ANY:
        return
    rows = [
        (compute_file_digest(data), path)
        for path, data in files
        if not path.resolve().is_relative_to(PACKAGE)
    ]
    record = get_record_path(environment)
    recorded = _read_record(record)
    if consent == RECORDING:
        _append_to_record(record, {digest: p for digest, p in rows if digest not in recorded})
        return
    listed = _parse_digests(consent)
    if unknown := [row for row in rows if row[0] not in listed | recorded]:
        lines = "".join(f"\n  {digest}  {path}" for digest, path in unknown)
        digests = ",".join(dict.fromkeys(digest for digest, _ in unknown))
        raise UntrustedCodeError(
            f"{key} names code that would run with all your rights, and you have not consented to "
            f"it (sha256, file):{lines}\nRead it. --trust-code runs and records it; in jobs set "
            f"{VARIABLE}={digests}."
        )
    environment[VARIABLE] = ",".join(sorted(listed | {digest for digest, _ in rows}))


def require_trusted_tasks(folder: Path, key: str) -> None:
    """Check that the user consents to a folder of task files of the evaluation harness.

    Its YAML files are code as its Python files are: `!function` names code, and the harness renders
    their Jinja texts without a sandbox.

    Args:
        folder: `include_path` of an entry of `evaluation.tasks`.
        key: key of that entry, for the message.

    Raises:
        UntrustedCodeError: a file has no consent.
        ConfigError: a file cannot be read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TASK_SUFFIXES)
    try:
        files = [(path, path.read_bytes()) for path in paths if path.is_file()]
    except OSError as error:
        raise ConfigError(
            f"{key}: {error.filename} cannot be read ({error.strerror}). Correct its permissions."
        ) from None
    require_trusted_code(files, key)


def get_record_path(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Return the file that has the digests of trusted code.

    Args:
        environment: variables to read; by default those of this process.

    Returns:
        Its path; it need not exist.
    """
    base = environment.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "llmsys" / "trusted_code"


def _parse_digests(text: str) -> set[str]:
    digests = set(filter(None, text.split(",")))
    if wrong := sorted(one for one in digests if not _DIGEST.fullmatch(one)):
        raise ConfigError(
            f"{VARIABLE}: {wrong[0]!r} is no sha256 of 64 hex digits. Give digests separated by "
            f"commas, as sha256sum prints them, or {ANY} to run any code; or unset it."
        )
    return digests


def _read_record(path: Path) -> set[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise ConfigError(
            f"{path}, the record of trusted code, cannot be read ({error.strerror}). Correct its "
            "permissions, or set XDG_CONFIG_HOME to another folder."
        ) from None
    return {line.split(" ", 1)[0] for line in lines}


def _append_to_record(path: Path, new: dict[str, Path]) -> None:
    """Append digests. A record that cannot be written is a warning: the command has its consent."""
    if not new:
        return
    # a path with a line break would be read as a line
    lines = "".join(f"{digest}  {str(file.absolute())!r}\n" for digest, file in new.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # one write to a file opened for appending: processes do not overwrite each other's lines
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, lines.encode())
        finally:
            os.close(file)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s), so the next command needs --trust-code again",
            path,
            error.strerror,
        )
        return
    for digest, file_path in new.items():
        log.info("trusted and recorded in %s: %s  %s", path, digest, file_path)
