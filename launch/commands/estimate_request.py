"""The question that a command line of `llmsys estimate` asks, and the values that it prints."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmsys.errors import ConfigError

if TYPE_CHECKING:
    from llmsys.config.loading.load import LoadedConfig
    from llmsys.estimate.cluster_costs import ClusterCosts
    from llmsys.estimate.json_output import EstimateOutput, ExportOutput
    from llmsys.estimate.program_run import ProgramRun
    from llmsys.estimate.run_cost import PricingRequest

EXAMPLE_LENGTH = 4096
# More devices than any site has, and more money than they cost.
MAX_ASKED = 10_000_000


def compute_estimate(arguments: argparse.Namespace) -> "tuple[LoadedConfig, EstimateOutput]":
    """Return the config and the estimate that a command line asks for.

    Args:
        arguments: parsed arguments of the verb.

    Returns:
        The loaded config, and the object that `--json` prints.

    Raises:
        LlmsysError: a value of the config or of an option is wrong.
    """
    from llmsys.config.loading.load import read_config

    resolved = read_config(arguments.config, arguments.overrides)
    from llmsys.estimate.run_estimate import estimate_run

    request = build_pricing_request(arguments)
    if request is not None:
        _check_batch(resolved, arguments)
    _check_documents(resolved, arguments.documents)
    device = None if request is None else request.device
    planned = build_program_run(resolved, arguments, request)
    result = estimate_run(
        resolved.run,
        model_only=resolved.is_model_only and not has_batch(resolved),
        has_budget=_has_budget(resolved),
        documents=arguments.documents,
        device=device,
        planned=planned,
        expert_load=1.0 if request is None else request.cluster.expert_load,
        layout=None
        if request is None or planned is not None
        else request.resolve_layout(resolved.run),
    )
    result = result.model_copy(update={"export": _build_export_output(resolved)})
    if resolved.source.suffix == ".json":
        from llmsys.estimate.counted.transformers_classes import match_transformers_class

        result = match_transformers_class(result, resolved.run)
    if request is not None:
        # half of the estimate's files, for priced runs only
        from llmsys.estimate.run_cost import add_costs

        request = replace(request, planned=planned)
        result = add_costs(result, resolved.run, request, model_only=not _has_budget(resolved))
    return resolved, result


def _build_export_output(resolved: "LoadedConfig") -> "ExportOutput":
    """Return the promise of an export, as `--json` prints it."""
    from llmsys.config.export.exported_model import build_export_promise
    from llmsys.estimate.json_output import ExportObstacle, ExportOutput

    promise = build_export_promise(resolved.run)
    obstacles = [
        ExportObstacle(key=f"model.{one.key}", value=one.value, possible=one.possible)
        for one in promise.obstacles
    ]
    return ExportOutput(
        model_type=promise.model_type,
        line=promise.line,
        nearest=promise.nearest,
        obstacles=obstacles,
    )


def _check_documents(resolved: "LoadedConfig", documents: Sequence[int]) -> None:
    """Raise ConfigError for a document that is longer than all data of the run."""
    tokens = resolved.run.train.tokens
    if _has_budget(resolved) and documents and max(documents) > tokens:
        raise ConfigError(
            f"--documents {max(documents)}: a document is longer than the {tokens} tokens of the "
            f"run. Use at most {tokens}, or more train.tokens."
        )


def has_batch(resolved: "LoadedConfig") -> bool:
    """Return whether somebody gave a batch; a bare model has none of its own.

    Args:
        resolved: the loaded config.

    Returns:
        True for a config with `batch.sequences` or `batch.tokens`, and for every run.
    """
    given = resolved.run.batch.model_fields_set & {"sequences", "tokens"}
    return not resolved.is_model_only or bool(given)


def _has_budget(resolved: "LoadedConfig") -> bool:
    return not resolved.is_model_only or "tokens" in resolved.run.train.model_fields_set


def choose_example_length(resolved: "LoadedConfig") -> int:
    """Return the sequence length of an example for a model that is given without a batch.

    Args:
        resolved: the loaded config.

    Returns:
        One that the model has positions for.
    """
    return min(EXAMPLE_LENGTH, resolved.run.model.max_position_embeddings)


def _check_batch(resolved: "LoadedConfig", arguments: argparse.Namespace) -> None:
    if has_batch(resolved):
        return
    length = choose_example_length(resolved)
    example = (
        f"llmsys estimate {arguments.config} --device {arguments.device or 'h100-sxm'} --gpus 64"
    )
    example += f" batch.sequence_length={length} batch.sequences=512"
    raise ConfigError(
        f"{arguments.config} is a bare model without a batch, and the time of a step depends on "
        f"it. Give one, such as\n  {example}\nor, for hours and money, a number of tokens too:\n  "
        f"{example} train.tokens=1_000_000_000_000"
    )


def build_program_run(
    resolved: "LoadedConfig", arguments: argparse.Namespace, request: "PricingRequest | None"
) -> "ProgramRun | None":
    """Build the run under the named program, or under `unknown` where nobody named one.

    Args:
        resolved: the loaded config.
        arguments: parsed arguments of the verb.
        request: device and cluster; None: the run is not priced.

    Returns:
        The run; None where llmsys itself trains it: the config is a whole run, and neither program,
        layout nor dtype is named.
    """
    named = {
        "--program": arguments.program,
        "--layout": arguments.layout,
        "--matmul-dtype": arguments.matmul_dtype,
    }
    given = [name for name, value in named.items() if value is not None]
    own_options = [
        option for option in ("finetune", "html") if getattr(arguments, option) is not None
    ]
    if given and own_options:
        raise ConfigError(
            f"--{own_options[0]} shows a run of llmsys itself. Leave out {given[0]}, or "
            f"--{own_options[0]}."
        )
    is_unknown = arguments.program is None and _is_program_unknown(resolved)
    if not given and (own_options or request is None or not is_unknown):
        return None
    if resolved.is_model_only:
        _check_batch(resolved, arguments)
    from llmsys.estimate.program_profile import UNKNOWN_PROGRAM
    from llmsys.estimate.program_search import plan_program_run

    return plan_program_run(
        resolved.run,
        UNKNOWN_PROGRAM if is_unknown else arguments.program,
        arguments.layout,
        device=None if request is None else request.device,
        num_devices=arguments.gpus,
        matmul_dtype=arguments.matmul_dtype,
        expert_load=1.0 if request is None else request.cluster.expert_load,
    )


def _is_program_unknown(resolved: "LoadedConfig") -> bool:
    """Return whether nothing says which program trains: a bare model without settings that only
    llmsys has. Whole runs are those of llmsys.
    """
    run = resolved.run
    own = {"engine"} & run.model_fields_set or {"compile"} & run.train.model_fields_set
    return resolved.is_model_only and not own


def add_my_machine_argument(parser: argparse.ArgumentParser) -> None:
    """Add --my-machine.

    Args:
        parser: of a verb that prices runs on a device.
    """
    parser.add_argument(
        "--my-machine",
        action="store_true",
        help="price the run on this machine: its accelerators by their profile, or its processor "
        "by a probe of about ten seconds, which is kept for 30 days; a named device wins",
    )


def find_my_machine() -> tuple[str, int]:
    """Return the profile of this machine's devices, and their number.

    Returns:
        As `--device` and `--gpus` take them.
    """
    # torch is loaded for this option alone
    from llmsys.calibrate.machine_probe import find_machine_device

    return find_machine_device()


def build_pricing_request(arguments: argparse.Namespace) -> "PricingRequest | None":
    """Return the device and cluster to price the run on; None where neither is named."""
    if arguments.device is None and arguments.cluster is None:
        if arguments.gpus is not None or arguments.price_per_hour is not None:
            given = f"--gpus {arguments.gpus}" if arguments.gpus is not None else "--price-per-hour"
            raise ConfigError(
                f"{given} needs a device. Add --device NAME, such as --device h100-sxm."
            )
        return None
    for name, value, least in (
        ("--gpus", arguments.gpus, 1),
        ("--price-per-hour", arguments.price_per_hour, 0),
    ):
        if value is not None and not value >= least:
            raise ConfigError(
                f"{name} {value} is too small: the minimum is {least}. Use {least} or more."
            )
        if value is not None and value > MAX_ASKED:
            raise ConfigError(
                f"{name} {value} is too large: the maximum is {MAX_ASKED}. Use {MAX_ASKED} or less."
            )
    from llmsys.estimate.run_cost import PricingRequest

    cluster = resolve_cluster(arguments)
    gpus = arguments.gpus if arguments.device is not None else arguments.gpus or cluster.devices
    device = cluster.device if arguments.device is None else arguments.device
    # Levels of the cluster's network replace the links of the device profile.
    placed = cluster.model_copy(update={"device": device}).load_device()
    return PricingRequest(placed, cluster, gpus)


def print_assumptions(cluster: "ClusterCosts", device: str | None, number: str | None) -> None:
    """Say on standard error which device, and how many, are assumed because nobody named them.

    Args:
        cluster: costs, as a file or nobody gave them.
        device: words that name the device; None where they did.
        number: words that give the number of devices; None where they did.
    """
    given = cluster.model_fields_set
    assumed = {
        f"device {cluster.device}": device if "device" not in given else None,
        f"number of devices {cluster.devices}": number if "devices" not in given else None,
    }
    words = {what: choose for what, choose in assumed.items() if choose is not None}
    if words:
        print(
            f"assumed, as nothing else was given: {', '.join(words)}. Choose with "
            f"{' '.join(words.values())}; llmsys list devices names the devices.",
            file=sys.stderr,
        )


def resolve_cluster(arguments: argparse.Namespace) -> "ClusterCosts":
    """Return the costs of the cluster file, or the defaults, at the price of the command line."""
    from llmsys.estimate.cluster_costs import ClusterCosts, load_cluster_costs

    cluster = ClusterCosts() if arguments.cluster is None else load_cluster_costs(arguments.cluster)
    price = arguments.price_per_hour
    return cluster if price is None else cluster.model_copy(update={"price_per_hour": price})
