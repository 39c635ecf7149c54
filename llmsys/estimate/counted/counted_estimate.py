"""Estimate a model type that is counted and not trained: parameters, operations, and bytes of its
weights.

Reads a config.json of Hugging Face. Time, memory of a step and cost need a model that llmsys can
build.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsys.estimate.counted.counted_model import TABLES, CountedModel, count_active_elements
from llmsys.estimate.counted.families import COUNTED_FAMILIES, EVERYWHERE
from llmsys.estimate.counted.json_output import CountedFlops, CountedOutput, CountedStepFlops
from llmsys.estimate.json_output import CountedBatch
from llmsys.estimate.model_tensors import ActiveParameters, ComponentCounts
from llmsys.estimate.summary_table import format_count, format_gib
from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.read_config_json import (
    COUNTED_TYPES,
    parse_json,
    require_layer_limit,
)
from llmsys.hugging_face.shared_fields import check_common_keys

# Bits of a stored weight. int8 and int4 are without the scales of their blocks.
WEIGHT_BITS = {"fp32": 32, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def find_counted_config(config: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the file and the values of a config.json whose model type is counted and not trained;
    None for others.

    Args:
        config: what the command line names.

    Returns:
        The path and its parsed values.

    Raises:
        ConfigError: the file is not JSON.
    """
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    values = parse_json(path.read_text(encoding="utf-8-sig"), str(path))
    return (path, values) if values.get("model_type") in COUNTED_TYPES else None


def build_counted_model(values: dict[str, Any], source: str) -> CountedModel:
    """Return the tensors and terms of a config.json.

    Args:
        values: the parsed file; its `model_type` is one of `COUNTED_TYPES`.
        source: name of the file in error messages.

    Returns:
        The model.

    Raises:
        ConfigError: with every key that is unknown, malformed or not a size.
    """
    require_layer_limit(values, source)
    family = COUNTED_FAMILIES[values["model_type"]]
    fields = ConfigJsonReader(values, family.defaults)
    fields.ignore_keys(*family.ignored.split(), *EVERYWHERE.split())
    encodes = values["model_type"] == "mt5"
    check_common_keys(fields, encoder_decoder=encodes)
    model = family.build(fields)
    fields.raise_violations(source)
    return model


def estimate_counted_model(
    model: CountedModel, sequences: int, length: int, target: int | None
) -> CountedOutput:
    """Estimate parameters, operations and bytes of weights.

    Args:
        model: from `build_counted_model`.
        sequences: sequences of a step.
        length: tokens of each; of the source in an encoder-decoder.
        target: tokens of each target in an encoder-decoder; None: as many as the source's.

    Returns:
        The object that `llmsys estimate --json` prints for such a model; no memory, run or price.
    """
    by_component: dict[str, int] = {}
    for row in model.rows:
        by_component[row.component] = by_component.get(row.component, 0) + row.num_elements
    total = sum(by_component.values())
    tables = sum(by_component.get(one, 0) for one in TABLES)
    active = sum(count_active_elements(model, row) for row in model.rows)
    inputs = 0 if model.tied_head else by_component["embedding"]
    tokens = (target or length) if model.is_encoder_decoder else length
    return CountedOutput(
        model_type=model.model_type,
        parameters=ComponentCounts(
            total=total,
            non_embedding=total - tables,
            active=ActiveParameters(
                all=active,
                without_input_embedding=active - inputs,
                without_embeddings=active - tables,
            ),
            by_component=by_component,
        ),
        batch=CountedBatch(
            sequence_length=length,
            target_length=tokens if model.is_encoder_decoder else None,
            sequences=sequences,
            tokens=sequences * tokens,
        ),
        flops=_build_step_flops(model, sequences, tokens, length),
        weights_bytes={name: (total * bits + 7) // 8 for name, bits in WEIGHT_BITS.items()},
        memory=None,
        run=None,
        unknown=dict.fromkeys(
            ("time", "money", "energy"), f"{model.model_type} is counted and not built by llmsys"
        ),
    )


def _build_step_flops(
    model: CountedModel, sequences: int, length: int, source: int
) -> CountedStepFlops:
    linear = model.count_linear_flops(sequences * length, sequences * source)
    scan = model.scan * sequences * length
    conventions = {}
    for name in ("causal", "full"):
        attention = sequences * model.count_attention_flops(length, source, full=name == "full")
        forward = linear + attention + scan
        conventions[name] = CountedFlops(
            forward=forward,
            forward_backward=3 * forward,
            forward_backward_per_token=3 * forward / (sequences * length),
            attention_share=attention / forward,
            scan_share=scan / forward,
        )
    return CountedStepFlops(
        convention="causal", conventions=conventions, **dict(conventions["causal"])
    )


def format_counted_estimate(result: CountedOutput) -> str:
    """Format the estimate of a counted model for people.

    Args:
        result: what `estimate_counted_model` returned, perhaps with `tensors`.

    Returns:
        Lines of text.
    """
    from llmsys.estimate.summary_table import iter_tensor_lines

    lines = list(_iter_lines(result))
    if result.tensors is not None:
        lines += ["", *iter_tensor_lines(result.tensors, result.parameters.total)]
    return "\n".join(lines)


def _iter_lines(result: CountedOutput) -> Iterator[str]:
    counts, flops, batch = result.parameters, result.flops, result.batch
    total = counts.total
    yield f"{'parameters':<22}{total:>26,}  {format_count(total)}"
    for name, count in counts.by_component.items():
        yield f"{'  ' + name:<22}{count:>26,}  {count / total:.1%}"
    active = counts.active
    for title, count, note in (
        ("active per token", active.all, "parameters used per token"),
        ("", active.without_input_embedding, "without the input embedding"),
        ("", active.without_embeddings, "without embeddings and head"),
    ):
        yield f"{title:<22}{count:>26,}  {note}"
    yield ""
    lengths = f"{batch.sequence_length}"
    if batch.target_length is not None:
        lengths += f" source and {batch.target_length} target"
    note = f"forward and backward of {batch.sequences} sequences of {lengths} tokens, causal"
    yield f"{'FLOPs of a step':<22}{flops.forward_backward:>26,}  {note}"
    for name, one in flops.conventions.items():
        scan = f", state-space scan {one.scan_share:.1%}" if one.scan_share else ""
        per_token = f"{format_count(one.forward_backward_per_token)} per token"
        shares = f"attention {one.attention_share:.1%}{scan}"
        yield f"{'  ' + name:<22}{one.forward_backward:>26,}  {per_token}, {shares}"
    yield ""
    for name, size in result.weights_bytes.items():
        yield f"{'weights in ' + name:<22}{size:>26,}  {format_gib(size)}"
    yield ""
    yield f"{', '.join(result.unknown)}: unknown ({next(iter(result.unknown.values()))})"
