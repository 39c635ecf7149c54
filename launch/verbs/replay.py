"""`llmsys replay`: make one step of a run again and hold it to what was recorded."""

import argparse
import json
from dataclasses import asdict

from llmsys.config.load import load_run
from llmsys.errors import ConfigError

DIFFERS = 1
MINE = ("step",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """step= stands among the overrides."""
    parser.epilog = f"step=N says which step, counted from 1.\n{parser.epilog}"


def run(arguments: argparse.Namespace) -> int:
    """Print each check; status 0 when all agree, 1 when one does not."""
    steps = [word.removeprefix("step=") for word in arguments.overrides if word.startswith("step=")]
    if len(steps) != 1 or not steps[0].isdigit():
        raise ConfigError("Say which step to replay: step=N, counted from 1.")
    config = load_run(arguments.config, [word for word in arguments.overrides if not word.startswith("step=")])
    from llmsys.doctor.replay import replay

    checks = replay(config, int(steps[0]))
    agree = all(check.agrees for check in checks)
    if arguments.json:
        print(json.dumps({"step": int(steps[0]), "agrees": agree, "checks": [asdict(check) for check in checks]}))
        return 0 if agree else DIFFERS
    for check in checks:
        verdict = "equal" if check.recorded == check.replayed else "agrees" if check.agrees else "DIFFERS"
        print(f"step {check.step:<8}{check.what:<15}{check.recorded!s:<34}{check.replayed!s:<34}{verdict}")
    print(f"step {steps[0]} {'is what was recorded' if agree else 'is NOT what was recorded'}: {len(checks)} checks")
    return 0 if agree else DIFFERS
