"""Redact secrets in everything that is written to a file or printed.

Invariants:
- The result of `redact_secrets` holds no password of a URL, no token or signature of its query, no value assigned to a
  variable with a secret name, and no key of a known shape.
- Redacting twice changes nothing more.
"""

import re
from typing import Any

REDACTED = "REDACTED"

_SECRET_WORDS = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|ACCESSKEY|KEYS?$", re.IGNORECASE)
"""Words that make a name secret wherever they occur in it."""
_SECRET_PARTS = frozenset(
    (
        *("auth", "authorization", "bearer", "cookie", "cookies", "dsn", "jwt", "key", "keys", "pass", "passcode"),
        *("pat", "pats", "pwd", "sas", "sig", "signature"),
    )
)
"""Words that make a name secret only as a whole part of it: PATH is not PAT."""
_PART_BORDER = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*)://(?P<rest>[^\s'\"<>`]+)", re.IGNORECASE)
_USER = re.compile(r"[^/?#]*@")
_PARAMETER = re.compile(r"(?P<name>[?&;#][^=&;#?]+)=(?P<value>[^&;#]*)")
_SECRET_PARAMETERS = frozenset(["policy", "googleaccessid", "awsaccesskeyid"])
_CONTAINER_SCHEMES = frozenset(("abfs", "abfss", "wasb", "wasbs", "az", "adl"))
"""Azure writes container@account, which is no secret."""
_ASSIGNMENT = re.compile(r"(?<![\w.])(?P<name>[A-Z][A-Z0-9_]+)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;'\"\]]+)")
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
        The text with `REDACTED` in place of each secret.
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
    if user is not None and (":" in user.group() or scheme.lower() not in _CONTAINER_SCHEMES | {"ssh", "sftp"}):
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
    name = _PLURAL_TOKENS.sub("", found["name"])  # MAX_TOKENS=512 and TOKENIZERS_PARALLELISM=false are settings
    return f"{found['name']}={REDACTED}" if is_secret_name(name) else found.group()
