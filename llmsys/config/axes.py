"""What forbids splitting a model's matrices over `layout.tensor` or its sequences over `layout.context`.

Read by Layout.fit and by RunConfig, so that a config is refused before a process starts. Each problem says the value,
the rule, and values that would do.
"""

from collections.abc import Iterator

from llmsys.config.engine import EngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.rule import Violation, list_divisors, format_choices


def find_model_sharding_violations(tensor: int, context: int, model: ModelConfig) -> Iterator[Violation]:
    """What the model forbids, whatever the engine and the number of ranks."""
    if tensor * context == 1:
        return
    yield from _find_kind_violations("tensor" if tensor > 1 else "context", model)
    yield from _find_head_violations(tensor, context, model)
    for key, width in _iter_sharded_widths(model):
        if width % tensor:
            legal = [n for n in list_divisors(width) if model.num_attention_heads % n == 0]
            yield Violation(
                "tensor",
                f"model.{key}={width} channels cannot be split over tensor={tensor} ranks. Use tensor={format_choices(legal)}, "
                f"or make it a multiple of {tensor}.",
            )


def find_run_sharding_violations(
    tensor: int, context: int, engine: EngineConfig, sequence_length: int, compiled: bool
) -> Iterator[Violation]:
    """What the rest of a config forbids."""
    parts = tensor * context
    if parts == 1:
        return
    axis = "tensor" if tensor > 1 else "context"
    if engine.kind != "torch" or engine.data_parallel != "fsdp":
        chosen = engine.kind if engine.kind != "torch" else f"torch with data_parallel={engine.data_parallel}"
        yield Violation(
            axis,
            f"engine.kind={chosen} has whole matrices and sequences on each rank. "
            f"Use engine.kind=torch with data_parallel=fsdp, or tensor=1 and context=1.",
        )
    if compiled:
        yield Violation(
            axis,
            "train.compile=block does not compile exchanges between ranks. "
            "Use train.compile=none, or tensor=1 and context=1.",
        )
    if sequence_length % parts:
        near = max(1, round(sequence_length / parts)) * parts
        yield Violation(
            axis,
            f"batch.sequence_length={sequence_length} positions cannot be divided over context={context} × "
            f"tensor={tensor} ranks. Use batch.sequence_length={near}, or another multiple of {parts}.",
        )


def _find_kind_violations(axis: str, model: ModelConfig) -> Iterator[Violation]:
    """Choices that need whole sequences on each rank outside of attention, or that nobody has split yet."""
    whole = {
        "model.family=encoder_decoder": model.family == "encoder_decoder",
        "model.head.kind=classification": model.head.kind == "classification",
        "model.position.kind=transformer_xl": model.position.kind == "transformer_xl",
    }
    if model.moe is not None:
        whole[f"model.moe.routing.kind={model.moe.routing.kind}"] = model.moe.routing.kind != "token_choice"
    for choice, found in whole.items():
        if found:
            yield Violation(
                axis,
                f"{choice} needs whole sequences on each rank. Use tensor=1 and context=1, and split over shard, "
                f"replicate or expert.",
            )


def _find_head_violations(tensor: int, context: int, model: ModelConfig) -> Iterator[Violation]:
    heads, parts = model.num_attention_heads, tensor * context
    if heads % parts:
        key = "tensor" if heads % tensor else "context"
        yield Violation(
            key,
            f"{heads} attention heads cannot be dealt to context={context} × tensor={tensor} ranks. "
            f"Their product must be {format_choices(list_divisors(heads))}.",
        )
        return
    if model.attention.kind == "latent":
        return
    groups = model.num_key_value_heads
    if not _can_share_heads(groups, tensor):
        yield _build_head_violation("tensor", tensor, groups, "key-value heads")
    elif not _can_share_heads(per_rank := max(1, groups // tensor), context):
        yield _build_head_violation("context", context, per_rank, "key-value heads of a tensor rank")


def _can_share_heads(groups: int, ranks: int) -> bool:
    """Whether ranks can have equally many heads, or as many ranks each of them."""
    return groups % ranks == 0 or ranks % groups == 0


def _build_head_violation(axis: str, ranks: int, groups: int, what: str) -> Violation:
    return Violation(
        axis,
        f"{groups} {what} cannot be dealt to {axis}={ranks} ranks: one number must divide the other. "
        f"Use {axis}={format_choices(list_divisors(groups))}, or a multiple of {groups}.",
    )


def _iter_sharded_widths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Inner widths of what the tensor axis splits: dense layers and shared experts."""
    if model.num_dense_layers:
        yield "intermediate_size", model.intermediate_size
    if model.moe is not None and model.moe.shared_expert_size and model.num_moe_layers:
        key = "shared_intermediate_size" if model.moe.shared_intermediate_size else "num_shared_experts"
        yield f"moe.{key}", model.moe.shared_expert_size
