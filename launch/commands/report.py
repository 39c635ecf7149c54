"""Run `llmsys report`: write one HTML page about the run folder and the dataset folder of a
config.
"""

import argparse
import json

from llmsys.errors import DataError
from llmsys.storage.paths import format_folder, parse_local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    parser.add_argument(
        "--output",
        type=parse_local_path,
        help="HTML file to write (default: report.html in the run or data folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from llmsys.config.loading.config_files import MANIFEST
    from llmsys.config.loading.load import read_config, require_run
    from llmsys.dataset.remote_dataset import is_prepared
    from llmsys.train.remote_run import fetch_run

    loaded = read_config(arguments.config, arguments.overrides)
    config = require_run(loaded, arguments.config)
    # the folder of a dataset names no run: the default run.folder would be another one's
    names_run = loaded.source.name != MANIFEST or ("run", "folder") in loaded.origins
    if names_run:
        fetch_run(config.run.folder)
    run_folder = config.run.folder if names_run and config.run.folder.is_dir() else None
    # A mixture has no page: each source has one.
    single = config.data.kind != "mixture" and (
        is_prepared(config.data.folder) or config.data.folder.is_dir()
    )
    data_folder = config.data.folder if single else None
    if run_folder is None and data_folder is None:
        raise DataError(
            f"neither run.folder {format_folder(config.run.folder)} nor data.folder "
            f"{format_folder(config.data.folder)} exists. "
            f"Run llmsys prepare {arguments.config} or llmsys train {arguments.config} first."
        )
    from llmsys.report.html_page import write_report

    path = write_report(run_folder, data_folder, arguments.output, data=config.data)
    print(json.dumps({"report": str(path)}) if arguments.json else str(path))
    return 0
