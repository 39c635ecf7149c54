"""Run `llmsys prepare CONFIG --compare OTHER.yaml …` and `llmsys inspect DATASET --compare OTHER`:
which documents one of two configs or datasets keeps alone, and why the other does not.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmsys.errors import ConfigError
from llmsys.log import get_logger

# Documents that are named for each test.
EXAMPLES = 2

if TYPE_CHECKING:
    from llmsys.config.data import CrawlConfig
    from llmsys.config.run import RunConfig


def prepare_and_compare(config: "RunConfig", arguments: argparse.Namespace) -> list[Path]:
    """Prepare the documents of a config and of others with what they share, and print how each
    other one differs from the first.

    Args:
        config: The first config.
        arguments: Of `llmsys prepare`.

    Returns:
        The dataset folders.

    Raises:
        ConfigError: The configs cannot be compared. Nothing was prepared.
    """
    from llmsys.config.loading.load import load_run_config
    from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
    from llmsys.data_pipeline.pipelines.shared_work import list_shared_stages, take_over_tasks

    others = [load_run_config(name, arguments.overrides) for name in arguments.compare]
    configs = [config, *others]
    data = _require_comparable(
        [one.data for one in configs], [arguments.config, *arguments.compare]
    )
    for number, own in enumerate(data):
        shared = [(list_shared_stages(source, own), source) for source in data[:number]]
        stages, source = max(shared, key=lambda one: len(one[0]), default=((), own))
        if stages:
            tasks = take_over_tasks(source.folder, own.folder, stages)
            get_logger(__name__).info("%s: %d tasks of %s", own.folder, tasks, source.folder)
        prepare_dataset(configs[number], until="documents")
    folders = [own.folder for own in data]
    print_differences(folders, arguments.json)
    return folders


def _require_comparable(sections: Sequence[object], names: Sequence[str]) -> list["CrawlConfig"]:
    from llmsys.config.data import CrawlConfig
    from llmsys.storage.paths import find_folder_url

    found: list[CrawlConfig] = []
    for name, data in zip(names, sections, strict=True):
        if not isinstance(data, CrawlConfig):
            raise ConfigError(
                f"{name} has data.kind={getattr(data, 'kind', '')}, and --compare needs "
                "data.kind=crawl."
            )
        if find_folder_url(data.folder) is not None:
            raise ConfigError(
                f"{name} has a dataset in object storage, and --compare reads all documents. Set "
                "data.folder to a folder of this machine."
            )
        for other, before in zip(names, found, strict=False):
            if data.folder == before.folder:
                raise ConfigError(
                    f"{other} and {name} have the same data.folder={data.folder}, so only one of "
                    "them can be prepared. Give each its own."
                )
        found.append(data)
    return found


def print_differences(folders: Sequence[Path], as_json: bool) -> None:
    """Print how each dataset after the first differs from the first.

    Args:
        folders: Two or more dataset folders.
        as_json: Print a list of JSON objects.
    """
    from llmsys.data_pipeline.inspection.dataset_differences import (
        compare_datasets,
        format_dataset_differences,
    )

    first, *others = folders
    found = [compare_datasets(first, other, EXAMPLES) for other in others]
    if as_json:
        print(json.dumps([asdict(one) for one in found], ensure_ascii=False))
    else:
        print("\n\n".join(format_dataset_differences(one) for one in found))
