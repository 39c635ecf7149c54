"""Read the files of many language profiles at once, parsed once per machine.

80 files of YAML take 60 ms in every process that prepares data. Their values only depend on their
bytes and on the parser, so the first process writes them into the cache folder as JSON.

Reads and writes `profiles/` in the cache folder.

Invariants:
- Values are those of `parse_yaml`. Values that JSON does not give back, a file that does not fit
  its digest, and a folder that cannot be written to cost the time to parse, and nothing else.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from llmsys.config.loading import yaml_files
from llmsys.config.loading.yaml_files import format_path, parse_yaml
from llmsys.errors import ConfigError
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import get_cache_folder

_DIGEST_BYTES = 16


def read_profile_values(paths: Sequence[Path]) -> list[Any]:
    """Read the values of profiles.

    Args:
        paths: Their files.

    Returns:
        The value of each file, None for an empty one.

    Raises:
        ConfigError: A file is no UTF-8 text, or not legal YAML.
    """
    contents = [path.read_bytes() for path in paths]
    place = _locate_values(contents)
    if (known := _read_values(place)) is not None:
        return known
    values = [parse_profile(path, content) for path, content in zip(paths, contents, strict=True)]
    # A value that JSON has no form for, or gives back as another one, is parsed each time.
    with suppress(OSError, ValueError, TypeError):
        data = json.dumps(values, allow_nan=False).encode()
        if repr(json.loads(data)) == repr(values):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(place, _compute_digest(data) + data)
    return values


def parse_profile(path: Path, content: bytes) -> Any:
    """Parse one profile.

    Args:
        path: Its file, for messages.
        content: Its bytes.

    Returns:
        The value, None for an empty file.

    Raises:
        ConfigError: It is no UTF-8 text, or not legal YAML.
    """
    try:
        return parse_yaml(content.decode(), format_path(path))[0]
    except UnicodeDecodeError:
        raise ConfigError(
            f"{format_path(path)} is not UTF-8 text. Give a YAML file, such as data/languages/zh."
        ) from None


def _locate_values(contents: Sequence[bytes]) -> Path:
    """Return the path of the values of some files. Its name has the parser's source, too."""
    parser = Path(yaml_files.__file__).read_bytes()
    parts = [yaml.__version__.encode(), parser, *contents]
    sizes = ",".join(str(len(part)) for part in parts).encode()
    return get_cache_folder() / "profiles" / _compute_digest(b"".join([sizes, *parts])).hex()


def _read_values(place: Path) -> list[Any] | None:
    """Return stored values; None if there are none, or their digest does not fit."""
    try:
        stored = place.read_bytes()
    except OSError:
        return None
    data = stored[_DIGEST_BYTES:]
    if stored[:_DIGEST_BYTES] != _compute_digest(data):
        return None
    values: list[Any] = json.loads(data)
    return values


def _compute_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
