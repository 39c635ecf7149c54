"""Rules between the sections of a run that compute what is legal: lengths, ranks, checkpoints,
images.

Each violation names the value, the rule and the remedy. What merely cannot be combined is in
combinations.yaml; rules of the axes are in parallel_layout.py.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.evaluation import EvaluationConfig
from llmsys.config.images import ImagesConfig
from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import OptimizerConfig, get_moment_block
from llmsys.config.parallel_layout import ParallelLayout, iter_sharded_widths
from llmsys.config.position import RopeConfig, is_length_dependent
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.config.section import find_nearest_multiples, list_divisors
from llmsys.errors import LayoutError, Violation, format_choices


def find_length_violations(
    model: ModelConfig, batch: BatchConfig, lengths: tuple[int, int]
) -> Iterator[Violation]:
    """Yield the sequences that are longer than the model allows.

    Args:
        model: the `model:` section.
        batch: the `batch:` section.
        lengths: tokens of one window at the encoder and at the decoder.
    """
    longest, given = model.max_position_embeddings, batch.model_fields_set | {"sequence_length"}
    for name, length in zip(("sequence_length", "target_sequence_length"), lengths, strict=True):
        # The second stream of XLNet has no positions.
        length = lengths[0] if model.head.kind == "permutation" else length
        if length > longest and name in given and not model.interpolates_positions:
            yield Violation(
                f"batch.{name}",
                f"{length} positions are more than model.max_position_embeddings={longest}. Use "
                f"at most {longest}"
                ", or raise model.max_position_embeddings.",
            )


def find_rotation_violations(
    model: ModelConfig, longest: int, *, pads_rows: bool
) -> Iterator[Violation]:
    """Yield a rotation that depends on the length of a row, where rows are as long as the longest
    row of their micro-batch: a loss would depend on what else is in it.

    Args:
        model: the `model:` section.
        longest: tokens of the longest row, of the encoder or the decoder.
        pads_rows: rows have unequal lengths, and are padded to the longest one of a micro-batch.
    """
    position = model.position
    if not pads_rows or not isinstance(position, RopeConfig):
        return
    scaling = position.scaling
    if is_length_dependent(scaling) and longest > scaling.original_max_position_embeddings:
        original = scaling.original_max_position_embeddings
        yield Violation(
            "model.position.scaling.kind",
            f"{scaling.kind} rotates by the length of a row beyond {original} positions, and rows "
            f"of up to {longest} are padded to the longest of their micro-batch, so a loss would "
            "depend on what else is in it. Use yarn, llama3, linear or none, or rows of at most "
            f"{original} positions (batch.sequence_length, batch.target_sequence_length).",
        )


def find_moment_violations(
    optimizer: OptimizerConfig, tensor: int, model: ModelConfig
) -> Iterator[Violation]:
    """Yield a violation where neighbours that share a scale of 8-bit moments would lie on two
    tensor ranks, which hold some columns each of the output projections.

    Args:
        optimizer: the `optimizer:` section.
        tensor: size of the tensor axis.
        model: the `model:` section.
    """
    if getattr(optimizer, "moments", "fp32") != "int8" or tensor == 1:
        return
    widths = dict(_iter_output_widths(model))
    legal = [
        size
        for size in list_divisors(model.num_attention_heads)
        if all(_has_whole_blocks(width, size) for width in widths.values())
    ]
    for name, width in widths.items():
        if not _has_whole_blocks(width, tensor):
            yield Violation(
                "optimizer.moments",
                f"int8 has one scale for {get_moment_block(width)} neighbours, and of the {width} "
                f"columns of {name} each of tensor={tensor} ranks has {width // tensor}. Use "
                f"layout.tensor={format_choices(legal)}, or optimizer.moments=bf16.",
            )


def _has_whole_blocks(width: int, tensor: int) -> bool:
    return width % (tensor * get_moment_block(width)) == 0


def _iter_output_widths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the inputs of each projection that tensor ranks split by its columns."""
    for key, width in iter_sharded_widths(model):
        yield f"down_proj (model.{key})", width
    attention = model.attention
    if not isinstance(attention, PythonAttentionConfig):
        for one in attention.iter_parameters(model):
            if one.name.endswith("o_proj.weight"):
                yield one.name, one.shape[-1]
    if model.family == "encoder_decoder":
        yield "cross_attention.o_proj.weight", model.num_attention_heads * model.head_dim


def is_replicated(engine: EngineConfig) -> bool:
    """Return whether every rank keeps all weights, gradients and moments.

    Args:
        engine: the `engine:` section.

    Returns:
        True under DDP, which Accelerate uses too.
    """
    return engine.kind == "accelerate" or (engine.kind == "torch" and engine.data_parallel == "ddp")


def _get_replication_settings(engine: EngineConfig) -> tuple[str, str]:
    """Return the setting that replicates, and the setting that shards instead."""
    if engine.kind == "accelerate":
        return "engine.kind=accelerate", "engine.kind=torch"
    return "engine.data_parallel=ddp", "engine.data_parallel=fsdp"


def resolve_layout(
    layout: ParallelLayout, engine: EngineConfig, model: ModelConfig, ranks: int
) -> ParallelLayout:
    """Return the layout for a number of ranks, with no size left open.

    Args:
        layout: the `layout:` section.
        engine: the `engine:` section. Under DDP the free ranks are replicas, not shards.
        model: the model, whose widths limit the axes.
        ranks: processes of the run.

    Returns:
        A layout whose axes multiply to `ranks`.

    Raises:
        LayoutError: with the value, the rule and the legal values.
    """
    if not is_replicated(engine):
        return layout.resolve(ranks, model)
    if layout.replicate not in (1, ranks):
        copies, shards = _get_replication_settings(engine)
        raise LayoutError(
            f"replicate={layout.replicate} replicas do not fit {ranks} ranks: with {copies} every "
            f"rank holds one replica. Leave layout.replicate out, start {layout.replicate} "
            f"processes, or use {shards}."
        )
    return layout.model_copy(update={"replicate": ranks, "shard": 1}).resolve(ranks, model)


def find_retention_violations(
    checkpoint: CheckpointConfig, evaluation_every_steps: int
) -> Iterator[Violation]:
    """Yield the retention rules that would select no checkpoint, or fewer than are averaged.

    Args:
        checkpoint: the `checkpoint:` section.
        evaluation_every_steps: steps between two evaluations; 0 evaluates at the end only.
    """
    if checkpoint.average_last > checkpoint.keep_last:
        yield Violation(
            "checkpoint.keep_last",
            f"{checkpoint.keep_last} cannot hold the {checkpoint.average_last} of average_last. "
            f"Use {checkpoint.average_last}.",
        )
    saved, kept = checkpoint.every_steps, checkpoint.keep_every_steps
    if kept and (not saved or kept % saved):
        near = max(1, round(kept / saved)) * saved if saved else 0
        remedy = f"Use keep_every_steps={near}" if saved else "Set checkpoint.every_steps"
        yield Violation(
            "checkpoint.keep_every_steps",
            f"{kept} is not a multiple of checkpoint.every_steps={saved}, so few or none of its "
            f"steps are saved. {remedy}, or 0.",
        )
    if checkpoint.keep_best and (
        not evaluation_every_steps or not saved or saved % evaluation_every_steps
    ):
        yield Violation(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} best checkpoints need an evaluation of each checkpoint, but "
            f"evaluation.every_steps={evaluation_every_steps} does not divide "
            f"checkpoint.every_steps={saved}. Use evaluation.every_steps={saved or 100}, or "
            "checkpoint.keep_best=0.",
        )


def find_evaluation_violations(
    evaluation: EvaluationConfig, objective: str, length: int
) -> Iterator[Violation]:
    """Yield a violation if held-out windows are longer than those of training.

    Args:
        evaluation: the `evaluation:` section.
        objective: `objective.kind`.
        length: positions of a training sequence.
    """
    longest = length if objective in ("next_token", "masked") else 0
    if evaluation.sequence_length > longest:
        yield Violation(
            "evaluation.sequence_length",
            f"{evaluation.sequence_length} positions exceed the {longest} of a training window. "
            f"Use at most {longest}.",
        )


def find_image_violations(
    data: ImagesConfig, model: ModelConfig, sequence_length: int
) -> Iterator[Violation]:
    """Yield the sizes of images that do not fit the patches of the model.

    Args:
        data: the `data:` section.
        model: the `model:` section; without patches it is refused elsewhere.
        sequence_length: positions of a sequence.
    """
    size = data.image_size
    patches = model.patches
    if patches is None:
        return
    if patches.num_channels != data.num_channels:
        yield Violation(
            "model.patches.num_channels",
            f"{patches.num_channels} differs from data.num_channels={data.num_channels}. Use "
            f"{data.num_channels}.",
        )
    if size % patches.patch_size:
        legal = format_choices(find_nearest_multiples(size, patches.patch_size))
        yield Violation(
            "data.image_size",
            f"{size} pixels are not a whole number of patches of {patches.patch_size}. "
            f"Use {legal}.",
        )
        return
    wanted = patches.count_positions(size)
    if wanted > model.max_position_embeddings and not model.interpolates_positions:
        yield Violation(
            "data.image_size",
            f"{size} pixels are {wanted} positions, and only learned ones are interpolated"
            f". Use {patches.image_size}, or position.kind=learned.",
        )
    if sequence_length != wanted:
        yield Violation(
            "batch.sequence_length",
            f"{sequence_length} is not the {wanted} positions of data.image_size={size}. Use "
            f"{wanted}.",
        )
