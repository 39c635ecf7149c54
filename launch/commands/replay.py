"""`llmsys replay`: make one step of a run again and hold it to what was recorded."""

import argparse
import json
from dataclasses import asdict

from launch.commands.arguments import split_arguments
from llmsys.config.load import load_run_config
from llmsys.errors import ConfigError

DIFFERS = 1
MINE = ("step",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """step= stands among the overrides."""
    parser.epilog = f"step=N says which step, counted from 1.\n{parser.epilog}"


def run(arguments: argparse.Namespace) -> int:
    """Print each check; status 0 when all agree, 1 when one does not."""
    mine, words = split_arguments(arguments.overrides, MINE)
    step = mine.get("step", "")
    if not step.isdigit():
        raise ConfigError("Say which step to replay: step=N, counted from 1.")
    config = load_run_config(arguments.config, words)
    from llmsys.doctor.step_replay import replay_step

    checks = replay_step(config, int(step))
    agree = all(check.agrees for check in checks)
    if arguments.json:
        print(json.dumps({"step": int(step), "agrees": agree, "checks": [asdict(check) for check in checks]}))
        return 0 if agree else DIFFERS
    for check in checks:
        verdict = "equal" if check.recorded == check.replayed else "agrees" if check.agrees else "DIFFERS"
        print(f"step {check.step:<8}{check.what:<15}{check.recorded!s:<34}{check.replayed!s:<34}{verdict}")
    print(f"step {step} {'is what was recorded' if agree else 'is NOT what was recorded'}: {len(checks)} checks")
    return 0 if agree else DIFFERS
