"""Read the config of a dataset from its manifest, and compare it with another one."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from llmsys.config.data import CrawlConfig
from llmsys.config.input_files import sort_inputs
from llmsys.dataset.manifest import Manifest
from llmsys.errors import DataError

MAX_SHOWN_DIFFERENCES = 8


def read_dataset_config(manifest: Manifest, data: CrawlConfig) -> CrawlConfig:
    """Return the config of the dataset in the folder of `data`.

    Raises:
        DataError: if this version cannot read it.
    """
    stored = manifest.config.get("data", {})
    own = {"folder": data.folder, "executor": data.executor.model_dump()}
    try:
        return CrawlConfig.model_validate(stored | own)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{data.folder} was prepared with a config that this version cannot read: "
            f"data.{where}: {first['msg']}. Prepare it again with: llmsys prepare CONFIG"
        ) from None


def describe_config_differences(manifest: Manifest, data: CrawlConfig) -> str:
    """Describe the differences between a config and that of its dataset.

    Args:
        manifest: manifest of the dataset.
        data: the config; its folder and executor are ignored.

    Returns:
        One sentence; "" if they are equal.
    """
    made = read_dataset_config(manifest, data)
    ignored = {"folder", "executor"}  # they do not change the documents
    pairs = [config.model_dump(mode="json", exclude=ignored) for config in (made, data)]
    for values in pairs:
        for name in ("inputs", "heldout_inputs"):
            values[name] = sort_inputs(values[name])
    found = [
        f"data.{name} was {was!r} and is {now!r}"
        for name, was, now in _iter_differences("", *pairs)
    ]
    if not found:
        return ""
    more = (
        f", and {len(found) - MAX_SHOWN_DIFFERENCES} more"
        if len(found) > MAX_SHOWN_DIFFERENCES
        else ""
    )
    return (
        f"{data.folder} was prepared with another config, which is used here: "
        f"{', '.join(found[:MAX_SHOWN_DIFFERENCES])}{more}."
    )


def _iter_differences(name: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost fields that differ, with both values; `-` where a side has none."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = (dict(enumerate(values)) for values in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _iter_differences(
                f"{name}.{key}" if name else str(key), one.get(key, "-"), other.get(key, "-")
            )
    elif one != other:
        yield name, one, other
