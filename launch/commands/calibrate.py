"""Run `llmsys calibrate`: measure this machine into a device profile, on one process or, with
its links, on several.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import parse_positive_number
from llmsys.storage.paths import parse_local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the profile's file, the number of processes and the figures that are not measured."""
    parser.add_argument(
        "--output",
        type=parse_local_path,
        default=Path("device.yaml"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="processes to start (default: 1); with 2 or more, measure their links too",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="existing profile of this device: peak FLOP/s, memory and interconnect are copied "
        "from it",
    )
    parser.add_argument(
        "--watts",
        type=parse_positive_number,
        help="power limit of one device, in watts (default: from its driver)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the profile, and print a summary; with --json, the whole profile."""
    if arguments.processes < 1:
        raise ConfigError(
            f"--processes {arguments.processes} is not a number of processes. Use 1 or more."
        )
    if not arguments.output.absolute().parent.is_dir():
        raise ConfigError(
            f"{arguments.output.parent} is not a folder. Make it, or choose another --output."
        )
    if arguments.output.is_dir():
        raise ConfigError(
            f"{arguments.output} is a folder. Name a file in it: --output "
            f"{arguments.output}/device.yaml."
        )
    # the ranks run this same command, and their launcher has set WORLD_SIZE
    if arguments.processes > 1 and "WORLD_SIZE" not in os.environ:
        return _start_ranks(arguments.processes)
    from llmsys.calibrate.calibration import measure_machine
    from llmsys.config.loading.yaml_files import dump_yaml
    from llmsys.estimate.device_profile import load_device_profile

    base = None if arguments.base is None else load_device_profile(arguments.base)
    device = measure_machine(watts=arguments.watts, base=base)
    if device is None:  # another rank writes
        return 0
    arguments.output.write_text(dump_yaml(device.model_dump(mode="json")), encoding="utf-8")
    message = ", ".join(
        f"{number} {flops / 1e12:.3g} TFLOP/s" for number, flops in device.peak_flops.items()
    )
    text = (
        f"{device.name}: {message}, {device.memory_bandwidth / 1e9:.3g} GB/s. Use it: --device "
        f"{arguments.output}"
    )
    print(json.dumps(device.model_dump(mode="json")) if arguments.json else text)
    return 0


def _start_ranks(processes: int) -> int:
    """Run the same command on several processes of this machine and return its status."""
    from llmsys.launch.launchers.torchrun import main
    from llmsys.parallel.port import find_free_port

    here = [
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        "--master-addr=127.0.0.1",
        f"--master-port={find_free_port()}",
    ]
    return main([*here, "-m", "llmsys.launch.main", *sys.argv[1:]])
