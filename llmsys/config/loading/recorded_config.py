"""config.yaml of a run folder: the resolved config of a run, with the version of the format.

Reads and writes the text of the file.

Invariants:
- A config.yaml that a run wrote has a version; a config that a person wrote may leave it out.
"""

from pathlib import Path
from typing import Any

import yaml

from llmsys.config.loading.yaml_files import format_path
from llmsys.log import redact_values
from llmsys.storage.stored_formats import RUN_CONFIG, VERSION_KEY, require_version

# Files next to the config.yaml of a run or of an imported model.
_RUN_FILES = ("environment.json", "checkpoints")


def format_recorded_config(values: dict[str, Any]) -> str:
    """Return the text of a config.yaml, with secrets redacted.

    Args:
        values: Sections of a run, as plain values.

    Returns:
        YAML, which begins with the version of the format.
    """
    versioned = {VERSION_KEY: RUN_CONFIG.version, **redact_values(values)}
    return yaml.safe_dump(versioned, sort_keys=False, allow_unicode=True)


def pop_format_version(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of a config file without the version of its format.

    Args:
        values: The mapping that the file has.
        path: The file.

    Returns:
        The other values.

    Raises:
        FormatError: The version is another one, or a run of an earlier release wrote the file.
    """
    is_recorded = path.name == "config.yaml" and any(
        (path.parent / name).exists() for name in _RUN_FILES
    )
    if VERSION_KEY in values or is_recorded:
        require_version(RUN_CONFIG, values, format_path(path))
    return {key: value for key, value in values.items() if key != VERSION_KEY}
