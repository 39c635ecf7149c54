"""Run `llmsys doctor`: check the guarantees of a run, the scaling of a model, and a device, on
this machine.
"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError
from llmsys.launch.commands.doctor_pairs import add_pairs_arguments, run_pairs_check
from llmsys.launch.process.rank_environment import set_device_variables
from llmsys.storage.paths import parse_local_path

if TYPE_CHECKING:
    from llmsys.doctor.parity_models import ParityModel

FAILED = 1
MOST_RANKS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the check, its number of processes, and its selections."""
    parser.add_argument(
        "check",
        choices=("parity", "pairs", "crash", "device", "coordinates", "core"),
        help="parity: compare engines and layouts; pairs: every pair of choices and events of a "
        "run, in few cases, against a plain process after each step; crash: inject faults; "
        "device: kernels, collectives, memory and speed of the accelerators of this machine, "
        "in about five minutes; coordinates: sizes of activations over the width of a model, "
        "under its parametrization and the standard one; core: which core prepares data, and its "
        "texts of the sample crawl against Python's",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="parity: model to check (default: tiny models of every kind); pairs: run whose "
        "choices are the defaults of all cases, with the tiny widths of the check (default: "
        "none); coordinates: run to check",
    )
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="such as model.num_hidden_layers=2",
    )
    parser.add_argument(
        "--processes",
        type=_parse_process_counts,
        metavar="N,N,…",
        help="parity: numbers of ranks (default: 1,2,4, or up to the number of accelerators); "
        "pairs: most processes of a case (default: 4); device: one number (default: one rank "
        "for each accelerator, or 2 on a CPU)",
    )
    parser.add_argument(
        "--precision",
        metavar="P,P,…",
        help="parity: dtypes (default: fp32,bf16); fp16 needs accelerators. device: dtypes of "
        "attention (default: all)",
    )
    parser.add_argument(
        "--engine",
        metavar="E,E,…",
        help="parity: run only these engines, such as fsdp,zero-3,bitwise (default: all)",
    )
    parser.add_argument(
        "--widths",
        type=_parse_widths,
        metavar="W,W,…",
        default=[64, 128, 256, 512],
        help="coordinates: values of model.hidden_size (default: 64,128,256,512)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        metavar="N",
        help="coordinates: steps of each model (default: %(default)s)",
    )
    parser.add_argument(
        "--html",
        type=parse_local_path,
        metavar="FILE",
        help="coordinates: write a page with the curves",
    )
    parser.add_argument(
        "--device",
        metavar="PROFILE",
        help="device: name or file of its profile (default: by the driver's name)",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        default=Path("device-check"),
        metavar="FOLDER",
        help="device: folder of device-check.json, which can be sent back (default: %(default)s)",
    )
    add_pairs_arguments(parser)
    _add_crash_arguments(parser)


def _add_crash_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kills",
        type=int,
        default=8,
        metavar="N",
        help="crash: number of random kills (default: 8)",
    )
    parser.add_argument(
        "--drills",
        metavar="D,D,…",
        help="crash: run only these tests (default: all); --drills list prints their names",
    )
    parser.add_argument(
        "--optimizer",
        metavar="O,O,…",
        help="crash: kill and resume a run of each of these optimizers instead, such as "
        "lion,adamw-int8; all: each",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table; status 0 when everything passed, 1 when something failed."""
    if arguments.check in ("crash", "device", "core") and arguments.config is not None:
        own = {
            "crash": "trains its own toy run",
            "device": "trains its own models",
            "core": "reads the sample crawl",
        }[arguments.check]
        raise ConfigError(f"doctor {arguments.check} {own}, not {arguments.config}. Leave it out.")
    # torch reads it at import; the reference run here then sums on one thread, as the ranks do
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    checks = {
        "parity": _run_parity_check,
        "pairs": run_pairs_check,
        "crash": _run_crash_check,
        "device": _run_device_check,
        "coordinates": _run_coordinate_check,
        "core": _run_core_check,
    }
    return checks[arguments.check](arguments)


def _run_parity_check(arguments: argparse.Namespace) -> int:
    import torch

    from llmsys.doctor.parity_check import format_parity_table, iter_failures, run_parity
    from llmsys.doctor.parity_matrix import ENGINES, iter_parity_cases
    from llmsys.doctor.parity_models import PARITY_MODELS
    from llmsys.errors import format_choices
    from llmsys.progress import Progress

    engines = tuple(arguments.engine.split(",")) if arguments.engine else tuple(ENGINES)
    if unknown := set(engines) - ENGINES.keys():
        raise ConfigError(
            f"--engine {', '.join(sorted(unknown))} is unknown. Use {', '.join(ENGINES)}."
        )
    precisions = _parse_precisions(arguments.precision) or ("fp32", "bf16")
    ranks: list[int] = arguments.processes or _list_possible_ranks(torch.cuda.device_count())
    subjects = (
        (_load_subject(arguments, max(ranks)),) if arguments.config is not None else PARITY_MODELS
    )
    cells = [
        cell for count in ranks for cell in iter_parity_cases(count, precisions, engines, subjects)
    ]
    if not cells:
        raise ConfigError(
            f"No engine and layout of {', '.join(engines)} takes {subjects[0].name} on "
            f"{format_choices(ranks)} processes. Use other numbers for --processes, or leave "
            "--engine out."
        )
    with Progress("parity", len(cells), "cell") as progress:
        outcomes = run_parity(cells, lambda outcome: progress.advance(1, at=outcome.case.placement))
    passed = all(outcome.has_passed for outcome in outcomes)
    if arguments.json:
        print(json.dumps({"passed": passed, "cells": [outcome.to_dict() for outcome in outcomes]}))
        return 0 if passed else FAILED
    print(format_parity_table(outcomes))
    print(*iter_failures(outcomes), sep="\n", end="" if passed else "\n")
    good = sum(outcome.has_passed for outcome in outcomes)
    print(
        f"{good} of {len(outcomes)} cases agree with one process in fp32; entries are relative "
        "errors of gradients"
    )
    return 0 if passed else FAILED


def _load_subject(arguments: argparse.Namespace, most_ranks: int) -> "ParityModel":
    from llmsys.config.loading.load import load_model_config
    from llmsys.doctor.parity_models import build_parity_model, require_memory

    model = load_model_config(arguments.config, arguments.overrides)
    subject = build_parity_model(model, str(arguments.config))
    require_memory(model, most_ranks)
    return subject


def _run_crash_check(arguments: argparse.Namespace) -> int:
    # Killed processes cannot give their semaphores back; that is the drill, and no news to anyone.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    from llmsys.doctor.crash_drills import (
        DRILLS,
        OPTIMIZERS,
        build_optimizer_drills,
        replace_kill_count,
        run_drills,
    )
    from llmsys.progress import Progress

    if arguments.drills == "list":
        print("\n".join(f"{drill.name:<52}{drill.promise}" for drill in DRILLS))
        return 0
    wanted = arguments.drills.split(",") if arguments.drills else [drill.name for drill in DRILLS]
    known = {drill.name: drill for drill in DRILLS}
    if unknown := set(wanted) - known.keys():
        raise ConfigError(
            f"--drills {', '.join(sorted(unknown))} is unknown. Use {', '.join(known)}."
        )
    if arguments.kills < 1:
        raise ConfigError(f"--kills {arguments.kills} is not a number of kills. Use 1 or more.")
    drills = replace_kill_count([known[name] for name in wanted], arguments.kills)
    if arguments.optimizer is not None:
        if arguments.drills is not None:
            raise ConfigError("--optimizer has drills of its own. Leave --drills out.")
        kinds = OPTIMIZERS if arguments.optimizer == "all" else arguments.optimizer.split(",")
        if unknown := set(kinds) - set(OPTIMIZERS):
            raise ConfigError(
                f"--optimizer {', '.join(sorted(unknown))} is unknown. Use {', '.join(OPTIMIZERS)}."
            )
        drills = build_optimizer_drills(kinds)
    with Progress("crash drills", len(drills), "drill") as progress:
        outcomes: list[Any] = run_drills(
            drills, lambda outcome: progress.advance(1, at=outcome.name)
        )
    passed = all(outcome.passed for outcome in outcomes)
    if arguments.json:
        print(json.dumps({"passed": passed, "drills": [outcome.to_dict() for outcome in outcomes]}))
    else:
        for one in outcomes:
            print(f"{'ok' if one.passed else 'FAIL':<6}{one.name:<52}{one.text}")
    return 0 if passed else FAILED


def _run_device_check(arguments: argparse.Namespace) -> int:
    # The ranks inherit the variables, which torch reads when it is loaded.
    set_device_variables(arguments.output)
    import torch

    from llmsys.doctor.attention_parity import DTYPES
    from llmsys.doctor.check_row import format_rows
    from llmsys.doctor.device_check import check_device, list_tasks, write_report
    from llmsys.parallel.device_setup import warn_about_unused_gpus
    from llmsys.parallel.process_group import get_local_device
    from llmsys.progress import Progress

    warn_about_unused_gpus(get_local_device())
    counts = arguments.processes or [torch.cuda.device_count() or 2]
    if len(counts) > 1:
        raise ConfigError(
            f"--processes {','.join(map(str, counts))}: doctor device takes one number of ranks."
        )
    if counts[0] > (most := torch.cuda.device_count() or counts[0]):
        raise ConfigError(
            f"--processes {counts[0]}: this machine has {most} accelerators. Use {most} or less."
        )
    dtypes: Any = _parse_precisions(arguments.precision) or tuple(DTYPES)
    tasks = list_tasks()
    with Progress("device", len(tasks), "check") as progress:
        report = check_device(
            tasks,
            counts[0],
            dtypes=dtypes,
            profile=arguments.device,
            on_task=lambda task: progress.advance(1, at=f"{task.kind}, {task.name}"),
        )
    path = write_report(report, arguments.output)
    if arguments.json:
        print(json.dumps(report.to_dict()))
        return FAILED if report.failed_rows else 0
    print(format_rows(report.rows))
    for row in report.failed_rows:
        print(f"failed: {row.section}, {row.name}")
    good = sum(row.state == "ok" for row in report.rows)
    print(
        f"{good} of {len(report.rows)} checks passed on {counts[0]} ranks in {report.seconds:.0f} "
        f"s; send {path} back"
    )
    return FAILED if report.failed_rows else 0


def _run_core_check(arguments: argparse.Namespace) -> int:
    """Print which core prepares data, and compare its texts with Python's."""
    from llmsys.data_pipeline.inspection.compare_cores import compare_cores
    from llmsys.launch.commands.demo import list_sample_shards

    result = compare_cores(list_sample_shards())
    print(json.dumps(result._asdict()) if arguments.json else result.to_text())
    return FAILED if result.different else 0


def _run_coordinate_check(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.doctor.coordinate_check import MAX_EXPONENT, check_coordinates, format_coordinates
    from llmsys.progress import Progress

    if arguments.config is None:
        raise ConfigError(
            "llmsys doctor coordinates needs a config. Give one, such as train/mup-tiny."
        )
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: activations change by steps. Use 1 or more.")
    config = load_run_config(arguments.config, arguments.overrides)
    require_trusted_run(config, "step")
    with Progress("coordinates", 2 * len(arguments.widths), "model") as progress:
        rows = check_coordinates(
            config, arguments.widths, arguments.steps, lambda name: progress.advance(1, at=name)
        )
    if arguments.html is not None:
        from llmsys.report.coordinate_page import write_coordinate_page

        write_coordinate_page(rows, arguments.steps, arguments.html)
    kind = config.model.parametrization.kind
    own = [row for row in rows if row.parametrization == kind]
    passed = kind == "standard" or all(row.is_flat for row in own)
    if arguments.json:
        print(json.dumps({"passed": passed, "rows": [asdict(row) for row in rows]}))
        return 0 if passed else FAILED
    print(format_coordinates(rows))
    if kind != "standard":
        verdict = "flat" if passed else "not flat"
        print(f"{kind} is {verdict}: an exponent is flat up to {MAX_EXPONENT}")
    return 0 if passed else FAILED


def _parse_widths(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of two or more widths. Use, for example, 64,128,256."
        )
    return sorted({int(word) for word in words})


def _parse_precisions(text: str | None) -> tuple[str, ...]:
    """Return the dtypes of --precision; none where it is not given."""
    precisions = tuple(text.split(",")) if text else ()
    if unknown := set(precisions) - {"fp32", "bf16", "fp16"}:
        raise ConfigError(
            f"--precision {', '.join(sorted(unknown))} is unknown. Use fp32, bf16 or fp16."
        )
    return precisions


def _list_possible_ranks(accelerators: int) -> list[int]:
    most = accelerators or MOST_RANKS
    return [count for count in (1, 2, 4, 8) if count <= most]


def _parse_process_counts(text: str) -> list[int]:
    if not all(word.isdigit() and int(word) > 0 for word in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of processes. Use, for example, 1,2,4."
        )
    return [int(word) for word in text.split(",")]
