"""Run `llmsys replay`: rerun one step of a run and compare it with the recorded values."""

import argparse
import json
from dataclasses import asdict

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import split_arguments

DIFFERS = 1
OWN_NAMES = ("step",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing but help: step= is given among the overrides."""
    parser.epilog = f"step=N chooses the step, counted from 1.\n{parser.epilog}"


def run(arguments: argparse.Namespace) -> int:
    """Print each check; return 0 when all agree, 1 otherwise."""
    own, words = split_arguments(arguments.overrides, OWN_NAMES)
    step = own.get("step", "")
    if not step.isdigit():
        raise ConfigError("Give the step to replay: step=N, counted from 1.")
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.launch.process.run_requirements import require_trained_run

    config = load_run_config(arguments.config, words)
    require_trusted_run(config, "training")
    require_trained_run(config)
    from llmsys.doctor.step_replay import replay_step

    checks = replay_step(config, int(step))
    agree = all(check.agrees for check in checks)
    if arguments.json:
        print(
            json.dumps(
                {"step": int(step), "agrees": agree, "checks": [asdict(check) for check in checks]}
            )
        )
        return 0 if agree else DIFFERS
    for check in checks:
        verdict = (
            "equal" if check.recorded == check.replayed else "agrees" if check.agrees else "DIFFERS"
        )
        print(
            "step "
            f"{check.step:<8}{check.what:<15}{check.recorded!s:<34}{check.replayed!s:<34}{verdict}"
        )
    print(
        f"step {step} {'is what was recorded' if agree else 'is NOT what was recorded'}: "
        f"{len(checks)} checks"
    )
    return 0 if agree else DIFFERS
