"""Run `llmsys estimate`: parameters, FLOPs, memory and, on a device, time and cost, before a run
starts.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmsys.errors import ConfigError
from llmsys.launch.commands.estimate_request import (
    add_my_machine_argument,
    build_pricing_request,
    compute_estimate,
    find_my_machine,
    print_assumptions,
    resolve_cluster,
)
from llmsys.storage.paths import parse_local_path

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmsys.config.model import ModelConfig
    from llmsys.config.run import RunConfig
    from llmsys.config.section import Section
    from llmsys.estimate.device_profile import DeviceProfile
    from llmsys.estimate.json_output import EstimateOutput

# As llmsys.estimate.kernel_context has them, which most estimates do not load.
MATMUL_DTYPES = ("compute", "fp8", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4")


Settings = TypeVar("Settings", bound="Section")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --explain, the packing of documents, and the device and cluster to price the run on."""
    parser.add_argument(
        "--explain", action="store_true", help="list every tensor with its parameter count"
    )
    parser.add_argument(
        "--documents",
        type=parse_lengths,
        default=(),
        metavar="N,N,…",
        help="document lengths in tokens, repeated to fill a packed sequence (default: one "
        "document)",
    )
    parser.add_argument(
        "--device", help="price the run on this device: a profile such as h100-sxm, or a YAML file"
    )
    add_my_machine_argument(parser)
    parser.add_argument(
        "--gpus", type=int, help="number of devices to price the run on (default: launch.processes)"
    )
    parser.add_argument(
        "--program",
        help="training program that runs it: a profile such as megatron, or a YAML file (default: "
        "llmsys for the config of a run, unknown for a bare model)",
    )
    parser.add_argument(
        "--layout",
        metavar="AXES",
        help="layout of another program, such as tp=8,pp=16,vp=2,dp=64, or auto: the fastest "
        "(default: layout.*)",
    )
    parser.add_argument(
        "--matmul-dtype",
        choices=MATMUL_DTYPES,
        help="dtype of matmuls in blocks (default: train.matmul_dtype)",
    )
    parser.add_argument(
        "--cluster",
        type=parse_local_path,
        metavar="FILE",
        help="YAML file with prices, power and failure rates",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="P",
        help="price of one accelerator hour, in the cluster's currency",
    )
    parser.add_argument(
        "--html",
        type=parse_local_path,
        metavar="FILE",
        help="write a page: memory of a step, roofline, timeline",
    )
    parser.add_argument(
        "--serve",
        metavar="KEY=VALUE,…",
        help="serve the model: batch=32,prompt=2048,output=512,weights=int4,cache=fp8; --gpus "
        "share each layer",
    )
    parser.add_argument(
        "--finetune",
        metavar="KEY=VALUE,…",
        help="train a part: rank=16,targets=attention (adapters), train=last,layers=4 (frozen "
        "parts), weights=int4",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; with --json, as one object with stable keys."""
    if arguments.my_machine and arguments.device is None and arguments.cluster is None:
        arguments.device, count = find_my_machine()
        arguments.gpus = arguments.gpus or count
        if arguments.price_per_hour is None:
            arguments.price_per_hour = 0.0  # nobody rents their own machine
    if arguments.device is None and arguments.cluster is not None:
        number = None if arguments.gpus is not None else "--gpus N"
        print_assumptions(resolve_cluster(arguments), "--device NAME", number)
    if arguments.config.endswith("json") or Path(arguments.config, "config.json").is_file():
        from llmsys.estimate.counted.counted_estimate import find_counted_config

        if (found := find_counted_config(arguments.config)) is not None:
            return _count_model(*found, arguments)
    from llmsys.estimate.run_estimate import list_tensor_counts
    from llmsys.estimate.summary_table import format_estimate

    if arguments.serve is not None:
        from llmsys.config.loading.load import read_config

        return _print_serving(
            read_config(arguments.config, arguments.overrides).run.model, arguments
        )
    resolved, result = compute_estimate(arguments)
    if arguments.finetune is not None:
        from llmsys.config.serving import FinetuneConfig
        from llmsys.estimate.finetuning import estimate_finetuning

        wanted = _parse_settings(arguments.finetune, FinetuneConfig, "--finetune")
        priced = build_pricing_request(arguments)
        device = None if priced is None else priced.device
        finetune = estimate_finetuning(resolved.run, wanted, result, device)
        result = result.model_copy(update={"finetune": finetune})
    if arguments.html is not None:
        request = build_pricing_request(arguments)
        device = None if request is None else request.device
        page = _write_page(result, resolved.run, device, arguments)
        result = result.model_copy(update={"page": str(page)})
    if arguments.explain:
        result = result.model_copy(update={"tensors": list_tensor_counts(resolved.run)})
    if arguments.json:
        _print_json(result)
    else:
        print(format_estimate(result, _list_finetune_lines(result)))
    return 0


def _print_json(output: "BaseModel") -> None:
    # a key that has a default is printed only where it was set
    print(json.dumps(output.model_dump(exclude_unset=True), ensure_ascii=False))


def _list_finetune_lines(result: "EstimateOutput") -> list[str]:
    if result.finetune is None:
        return []
    # few estimates are of fine-tuning
    from llmsys.estimate.serving_table import iter_finetune_lines

    return list(iter_finetune_lines(result.finetune))


def _write_page(
    result: "EstimateOutput",
    config: "RunConfig",
    device: "DeviceProfile | None",
    arguments: argparse.Namespace,
) -> Path:
    """Write the page of the estimate and return its path."""
    from llmsys.estimate.roofline import list_layer_kernels
    from llmsys.estimate.step_timeline import build_timeline_from_estimate, count_rank_micro_batch
    from llmsys.report.estimate_page import write_estimate_page

    kernels, timeline = [], None
    layout = {} if result.memory is None else result.memory.layout
    if device is not None:
        sequences, tensor = count_rank_micro_batch(layout, config)
        kernels = list_layer_kernels(
            config.model, device, sequences, config.batch.sequence_length, tensor
        )
    if result.time is not None:
        timeline = build_timeline_from_estimate(result.time.parts_seconds, layout, config)
    return write_estimate_page(
        result, arguments.config, arguments.html, device=device, kernels=kernels, timeline=timeline
    )


def _print_serving(model: "ModelConfig", arguments: argparse.Namespace) -> int:
    """Print what serving the model takes: memory, and on a device time and cost."""
    from llmsys.config.serving import ServingConfig
    from llmsys.estimate.serving import estimate_serving
    from llmsys.estimate.serving_table import format_serving

    request = build_pricing_request(arguments)
    cluster = resolve_cluster(arguments)
    device = None if request is None else request.device
    load = _parse_settings(arguments.serve, ServingConfig, "--serve")
    result = estimate_serving(model, load, device, cluster, arguments.gpus or 1)
    if arguments.json:
        _print_json(result)
    else:
        print(format_serving(result))
    return 0


def _parse_settings(text: str, section: type[Settings], option: str) -> Settings:
    """Return the section that `key=value,key=value` sets."""
    from pydantic import ValidationError

    from llmsys.config.loading.merge import read_overrides
    from llmsys.config.loading.validation_errors import build_config_error

    layer = read_overrides(text.split(","))
    try:
        return section.model_validate(layer.values)
    except ValidationError as error:
        raise build_config_error(error, section, layer, option) from None


def _count_model(path: Path, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Print the counts of a model type that llmsys does not build."""
    from llmsys.config.loading.load import parse_batch
    from llmsys.estimate.counted import counted_estimate as counted
    from llmsys.estimate.run_estimate import build_tensor_counts

    for option in ("device", "cluster", "gpus", "documents", "serve", "finetune", "html"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option}: {values['model_type']} is counted and not priced. Leave it out, or "
                "give a model type that llmsys builds."
            )
    model = counted.build_counted_model(values, str(path))
    batch = parse_batch(arguments.overrides, f"llmsys estimate {path}")
    longest = min(batch.sequence_length, model.longest or batch.sequence_length)
    length = batch.sequence_length if "sequence_length" in batch.model_fields_set else longest
    result = counted.estimate_counted_model(
        model, batch.sequences_per_step, length, batch.target_sequence_length
    )
    if arguments.explain:
        result = result.model_copy(update={"tensors": build_tensor_counts(model.rows)})
    if arguments.json:
        _print_json(result)
    else:
        print(counted.format_counted_estimate(result))
    return 0


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the document lengths in tokens of `100,300`."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of document lengths in tokens. Use, for example, 512 or "
            "100,300."
        )
    return lengths
