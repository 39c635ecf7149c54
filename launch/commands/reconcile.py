"""Run `llmsys reconcile`: compare predicted with measured step time and memory, and fit a device
profile.
"""

import argparse
import json

from llmsys.errors import ConfigError, DataError
from llmsys.storage.paths import parse_folder_argument, parse_local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run folders, and --update for the device profile to write."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=parse_folder_argument, help="run folder"
    )
    parser.add_argument(
        "--update",
        metavar="FILE",
        type=parse_local_path,
        help="device profile to write the fitted residual to; created if missing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a table for each run, then the runs that could not be compared; with --json, as one
    object.
    """
    from llmsys.config.loading.yaml_files import dump_yaml
    from llmsys.estimate.prediction_error import (
        format_run_comparison,
        load_profile_to_update,
        load_run_comparisons,
        update_profile,
    )
    from llmsys.storage.atomic_write import write_bytes_atomically

    runs, problems = load_run_comparisons(arguments.runs)
    if not runs:
        raise DataError(" ".join(problems))
    result = [one.to_dict() for one in runs]
    profile = None
    if arguments.update is not None:
        if not arguments.update.absolute().parent.is_dir():
            raise ConfigError(
                f"{arguments.update.parent} is not a folder. Make it, or choose another --update."
            )
        profile = update_profile(load_profile_to_update(arguments.update, runs), runs)
        write_bytes_atomically(
            arguments.update, dump_yaml(profile.model_dump(mode="json")).encode()
        )
    if arguments.json:
        learnt = None if profile is None else profile.model_dump(mode="json")["residual"]
        print(json.dumps({"runs": result, "problems": problems, "residual": learnt}))
        return 0
    print("\n\n".join([*map(format_run_comparison, result), *problems]))
    if profile is not None:
        for kind, one in profile.residual.items():
            message = (
                f"a factor of {one.factor:.3f} and a spread of {one.spread:.3f} from "
                f"{len(one.runs)} runs"
            )
            print(f"\n{arguments.update}: {message}, for {kind} models on {profile.name}")
    return 0
