"""Run `accelerate launch` with the user's accelerate config, and report a failed rank in one
message.

`python -m llmsys.launch.launchers.accelerate [accelerate's options] SCRIPT …`, for several
processes. Without a config, and on machines without accelerators, processes are joined as by
torchrun, because `accelerate launch` would start one process there whatever --num_processes says.
"""

import os
import sys
from collections.abc import Sequence

import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser

from llmsys.launch.launchers.torchrun import run_elastic_agent
from llmsys.launch.train import MENDABLE

# Defaults of `accelerate launch` without a config; set here, because it warns about each.
SILENT = {"num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
ALONE = (
    "llmsys: error: the accelerate config has distributed_type: NO, which trains in one process, "
    "but launch.processes={}. Run `accelerate config` for several processes, or set "
    "launch.processes=1."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks; return 0, or the exit status of the rank that failed first."""
    options = launch_command_parser().parse_args(
        sys.argv[1:] if arguments is None else list(arguments)
    )
    kind = read_distributed_type(options.config_file)
    if kind is None:
        for name, value in SILENT.items():
            setattr(options, name, getattr(options, name, None) or value)
    if kind == "NO":
        print(ALONE.format(options.num_processes), file=sys.stderr)
        return MENDABLE
    # without it accelerate starts one process here, whatever --num_processes says
    options.multi_gpu = kind in (None, "MULTI_CPU")
    return run_elastic_agent(lambda: launch_command(options))


def read_distributed_type(config_file: str | None) -> str | None:
    """Return `distributed_type` of the user's accelerate config; None without a config."""
    path = config_file or default_config_file
    if not os.path.isfile(path):
        return None
    with open(path) as opened:
        kind: str = (yaml.safe_load(opened) or {}).get("distributed_type", "NO")
    return kind


if __name__ == "__main__":
    sys.exit(main())
