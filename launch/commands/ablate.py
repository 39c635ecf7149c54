"""Run `llmsys ablate`: prepare variants of a data config, train one model on each, and compare them
on the same held-out pages.

Writes one folder: datasets, runs, `ablation.json` and `ablation.html`.

Invariants:
- Each step resumes, so that the same command after a kill ends with the same results.
- Nothing is trained before every dataset is prepared.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import parse_count
from llmsys.log import get_logger
from llmsys.storage.paths import parse_local_path

if TYPE_CHECKING:
    from llmsys.ablation.plan import AblationPlan
    from llmsys.ablation.record import AblationRecord, ScoredRun

PAGE = "ablation.html"
log = get_logger(__name__)
OUTPUTS = """\
what it writes into --output:
  data/NAME            the dataset of each variant; base, its tokenizer, is used by all
  heldout/SET          held-out sets: `pages` (held-out pages before any rule) and
                       `kept_by_base` (those of them that the base keeps, with its texts)
  runs/NAME/seed-N     the runs, as `llmsys train` writes them
  ablation.json .html  the results; the same command again goes on where it was stopped

a variant is a file with what differs from BASE, such as
  data: {deduplicate: {exact: {kind: none}, minhash: {kind: none}}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add BASE, the variants, and options."""
    parser.add_argument(
        "config", metavar="BASE", help="config of the base: data, model and recipe of all variants"
    )
    parser.add_argument(
        "words",
        metavar="VARIANT",
        nargs="+",
        help="file that is merged over BASE and changes only `data`; its name is that of the "
        "variant. section.key=value words override BASE and all variants",
    )
    parser.add_argument(
        "--seeds",
        type=parse_count(1),
        default=3,
        metavar="N",
        help="runs of each variant, with seeds from BASE's run.seed on; intervals need two "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--heldout",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a further held-out set: documents as JSON lines, Parquet or Arrow, with the fields "
        "of data.read",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        default=Path("runs/ablation"),
        metavar="FOLDER",
        help="folder to write (default: %(default)s)",
    )
    parser.epilog = f"{OUTPUTS}\n{parser.epilog}"


def run(arguments: argparse.Namespace) -> int:
    """Run the ablation to its end and print the table."""
    from llmsys.data_pipeline.executors.garbage_collection import collect_less_often

    collect_less_often()
    variants, overrides = split_words(arguments.words)
    from llmsys.ablation.differences import compute_difference
    from llmsys.ablation.page import write_ablation_page
    from llmsys.ablation.plan import BASE, build_plan
    from llmsys.ablation.record import open_record, save_record
    from llmsys.ablation.table import format_table
    from llmsys.storage.folder_lock import lock_folder

    plan = build_plan(
        arguments.config,
        variants,
        overrides,
        arguments.output,
        arguments.seeds,
        arguments.heldout,
    )
    _require_trainable(plan)
    with lock_folder(plan.folder):
        record = open_record(plan)
        _prepare_datasets(plan, record)
        _train_variants(plan, record)
        base = {name: record.get_scores(BASE, name) for name in record.sets}
        for variant in record.variants:
            if variant == BASE:
                continue
            found = {
                name: compute_difference(base[name], record.get_scores(variant, name))
                for name in record.sets
            }
            record.differences[variant] = {name: one for name, one in found.items() if one}
        save_record(record, plan.folder)
        page = write_ablation_page(record, plan.folder / PAGE)
    print(record.model_dump_json() if arguments.json else f"{format_table(record)}\n{page}")
    return 0


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell variants and overrides apart.

    Args:
        words: The words after BASE.

    Returns:
        Files of variants, and `section.key=value` words.

    Raises:
        ConfigError: There is no variant.
    """
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    variants = [word for word in words if word not in overrides]
    if not variants:
        raise ConfigError(
            "llmsys ablate has no variant to compare with the base. Give one or more files with "
            "what differs from it."
        )
    return variants, overrides


def _require_trainable(plan: "AblationPlan") -> None:
    """Check what each run would find only after all datasets are prepared."""
    from llmsys.launch.process.run_requirements import require_initial_weights, require_layout

    require_initial_weights(plan.base)
    if processes := plan.base.launch.processes:
        require_layout(plan.base, processes)


def _prepare_datasets(plan: "AblationPlan", record: "AblationRecord") -> None:
    from llmsys.ablation.datasets import AblationDatasets
    from llmsys.ablation.record import save_record

    count = len(plan.variants) + 1
    number = 0

    def announce(heading: str) -> None:
        nonlocal number
        number += 1
        log.info("[%d/%d] %s", number, count, heading)

    AblationDatasets(plan, record).prepare_all(announce)
    save_record(record, plan.folder)


def _train_variants(plan: "AblationPlan", record: "AblationRecord") -> None:
    """Train and score what has no score yet, seed by seed, so that an early table has all
    variants.
    """
    from llmsys.ablation.record import save_record

    _remove_outdated_scores(record)
    runs = [(name, seed) for seed in plan.seeds for name in plan.variants]
    for number, (name, seed) in enumerate(runs, start=1):
        scored = record.runs.setdefault(name, {})
        if str(seed) in scored:
            continue
        log.info("[%d/%d] train %s with seed %d", number, len(runs), name, seed)
        scored[str(seed)] = _train_and_score(plan, record, name, seed)
        save_record(record, plan.folder)


def _remove_outdated_scores(record: "AblationRecord") -> None:
    """Remove the scores of other data: of variants that are no longer compared, and of datasets or
    held-out sets that were made again. Their runs stay.
    """
    for name, scored in list(record.runs.items()):
        if name not in record.datasets:
            del record.runs[name]
            continue
        wanted = _list_fingerprints(record, name)
        for seed in [seed for seed, one in scored.items() if one.fingerprints != wanted]:
            del scored[seed]


def _list_fingerprints(record: "AblationRecord", name: str) -> dict[str, str]:
    """Return the fingerprints of what a score depends on: the data of training, and each set."""
    sets = {heldout: one.fingerprint for heldout, one in record.sets.items()}
    return {"": record.datasets[name].fingerprint, **sets}


def _train_and_score(
    plan: "AblationPlan", record: "AblationRecord", name: str, seed: int
) -> "ScoredRun":
    from llmsys.ablation.heldout_scores import evaluate_run
    from llmsys.ablation.record import ScoredRun
    from llmsys.config.loading.config_files import format_recorded_config
    from llmsys.config.loading.load import load_run_config
    from llmsys.estimate.device_profile import MACHINE_PROFILE, NOT_MEASURED
    from llmsys.launch.commands.train import is_finished, require_finish
    from llmsys.launch.launchers.local import run_local_ranks
    from llmsys.launch.process.run_requirements import require_startable
    from llmsys.storage.atomic_write import write_bytes_atomically

    path = plan.folder / "configs" / f"{name}.yaml"
    written = format_recorded_config(plan.build_config(name).model_dump(mode="json"))
    write_bytes_atomically(path, written.encode())
    words = [
        str(path),
        f"run.seed={seed}",
        f"run.folder={plan.get_run_folder(name, seed)}",
        f"run.name={name}-{seed}",
    ]
    config = load_run_config(words[0], words[1:])
    require_startable(config, words)
    if not is_finished(config):
        # Its time is of no interest, and measuring the machine takes longer than a small run.
        os.environ.setdefault(MACHINE_PROFILE, NOT_MEASURED)
        run_local_ranks(config, words)
        require_finish(config)
    scores = evaluate_run(config, {one: plan.get_set_folder(one) for one in record.sets})
    return ScoredRun(fingerprints=_list_fingerprints(record, name), scores=scores)
