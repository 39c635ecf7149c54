"""Estimate continued training with frozen parts and low-rank adapters: trained parameters,
operations, memory, time.

Nothing is trained by this: llmsys has no adapters. The numbers follow from the estimate of the full
run.

Invariants:
- A matrix costs its product forward, one for the gradient of its input where something before it is
  trained, and one for its own gradient if it is trained.
- Memory errs on the side of too much: activations are those of the full run, except in blocks that
  no gradient reaches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.run import RunConfig
from llmsys.config.serving import FinetuneConfig
from llmsys.errors import ConfigError
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.flops import count_flops
from llmsys.estimate.json_output import EstimateOutput, RankMemory
from llmsys.estimate.local_copies import compute_frozen_share
from llmsys.estimate.model_tensors import count_parameters, is_head_tied, list_model_tensors
from llmsys.estimate.serving_memory import estimate_weight_bytes
from llmsys.estimate.serving_output import FinetuneFlops, FinetuneMemory, FinetuneOutput

# Components of the matrices that get adapters.
TARGETS = {
    "attention": ("attention",),
    "feed_forward": ("feed_forward", "experts", "shared_experts"),
    "all": ("attention", "feed_forward", "experts", "shared_experts"),
}
HEAD = ("head", "head_bias", "head_other")
# Bytes per parameter in memory that only trained ones have, by part of the state.
STATE_PARTS = ("masters", "gradients", "moments", "weights")


@dataclass(frozen=True)
class TrainedPart:
    """The part of a model that is trained.

    Attributes:
        parameters: trained pretrained weights.
        adapters: parameters of the adapters.
        first_block: first block that a gradient reaches.
        rows: trained tensors, with the blocks in which they are.
    """

    parameters: int
    adapters: int
    first_block: int
    rows: tuple[ParameterTensor, ...]


def iter_adapted_rows(model: ModelConfig, config: FinetuneConfig) -> Iterator[ParameterTensor]:
    """Yield the matrices that get adapters.

    Args:
        model: architecture.
        config: rank and targets.
    """
    if config.rank:
        for row in list_model_tensors(model):
            if row.layers and row.input is not None and row.component in TARGETS[config.targets]:
                yield row


def count_adapter_parameters(row: ParameterTensor, rank: int) -> int:
    """Return the parameters of A and B for all copies of a matrix; experts have their own.

    Args:
        row: a matrix of shape (outputs, inputs), or (experts, outputs, inputs).
        rank: channels between A and B.

    Returns:
        rank · (inputs + outputs), for each copy.
    """
    matrices = row.elements_per_copy // (row.shape[-1] * row.shape[-2])
    return row.num_copies * matrices * rank * (row.shape[-1] + row.shape[-2])


def select_trained_part(model: ModelConfig, config: FinetuneConfig) -> TrainedPart:
    """Return what is trained.

    Args:
        model: architecture; a decoder or an encoder without weights that layers share.
        config: what to train.

    Returns:
        Trained tensors and counts.

    Raises:
        ConfigError: nothing is trained, or the model has stacks or shared layers, of which no part
            can be named.
    """
    if model.family == "encoder_decoder" or model.recurrence is not None or model.rnn is not None:
        raise ConfigError(
            "--finetune: needs one stack of blocks with their own weights. Give a decoder or an "
            "encoder."
        )
    if model.has_linear_layers:
        raise ConfigError(
            "--finetune: layers of linear_attention have products in the backward pass that no "
            "count of a part has. Leave --finetune out, or use full or sliding attention in all "
            "layers."
        )
    if getattr(model.attention, "sparse", None) is not None:
        raise ConfigError(
            "--finetune: attention.sparse has a loss of its own, which no count of a part has. "
            "Leave --finetune out, or set attention.sparse to null."
        )
    if not config.rank and config.train == "none":
        raise ConfigError(
            "--finetune: nothing is trained. Set rank=16, or train=last, norms, head or all."
        )
    if config.train == "last" and config.layers > model.num_hidden_layers:
        raise ConfigError(
            f"--finetune: layers={config.layers} is more than "
            f"num_hidden_layers={model.num_hidden_layers}. Use train=all."
        )
    rows = tuple(_iter_trained_rows(model, config))
    adapted = list(iter_adapted_rows(model, config))
    blocks = {layer for row in (*rows, *adapted) for layer in row.layers}
    outside = any(row.component in ("embedding", "positions") and not row.layers for row in rows)
    first = 0 if outside else min(blocks, default=model.num_hidden_layers)
    adapters = sum(count_adapter_parameters(row, config.rank) for row in adapted)
    return TrainedPart(sum(row.num_elements for row in rows), adapters, first, rows)


def _iter_trained_rows(model: ModelConfig, config: FinetuneConfig) -> Iterator[ParameterTensor]:
    first = model.num_hidden_layers - config.layers
    for row in list_model_tensors(model):
        is_end = not row.layers and (row.component in HEAD or row.component == "norms")
        match config.train:
            case "none":
                continue
            case "all":
                yield row
            case "norms":
                if row.component == "norms":
                    yield row
            case "head":
                if not row.layers and row.component in HEAD:
                    yield row
            case "last":
                kept = tuple(layer for layer in row.layers if layer >= first)
                if kept:
                    yield ParameterTensor(
                        row.name, row.shape, row.component, kept, row.input, row.steps
                    )
                elif is_end:
                    yield row


def count_finetune_flops(
    model: ModelConfig, config: FinetuneConfig, sequences: int, length: int
) -> dict[str, int]:
    """Count the operations of a step: forward, gradients of inputs, gradients of weights, and
    adapters.

    Args:
        model: architecture.
        config: what is trained.
        sequences: sequences of the step.
        length: tokens of each.

    Returns:
        Operations by part, with attention over all of s² as in the convention `full`.
    """
    part = select_trained_part(model, config)
    count = count_flops(model, length, sequences, "full")
    tokens = sequences * length
    adapted = list(iter_adapted_rows(model, config))
    return {
        "forward": count.forward,
        "input_gradients": _count_input_gradients(
            model, config, part, sequences, length, count.forward
        ),
        "weight_gradients": 2 * tokens * sum(_count_multiplied(model, row) for row in part.rows),
        "adapters": 3
        * 2
        * tokens
        * sum(_count_adapter_products(model, row, config.rank) for row in adapted),
    }


def _count_multiplied(model: ModelConfig, row: ParameterTensor) -> int:
    """Return the elements of a trained tensor that one token multiplies; a tied head's embedding
    too.
    """
    if row.name == "embed.weight":
        return row.num_elements if is_head_tied(model) else 0
    if row.input is None:
        return 0
    visits = model.moe.visits_per_token if row.input == "visit" and model.moe is not None else 1
    return int(row.elements_per_vector * visits)


def _count_adapter_products(model: ModelConfig, row: ParameterTensor, rank: int) -> int:
    elements = row.num_copies * rank * (row.shape[-1] + row.shape[-2])
    return int(
        elements
        * (model.moe.visits_per_token if row.input == "visit" and model.moe is not None else 1)
    )


def _count_input_gradients(
    model: ModelConfig,
    config: FinetuneConfig,
    part: TrainedPart,
    sequences: int,
    length: int,
    forward: int,
) -> int:
    """Return the operations of gradients of inputs: the head's, and those of the blocks from the
    first trained one.
    """
    tokens, layers = sequences * length, model.num_hidden_layers
    rows = list_model_tensors(model)
    linear = 2 * tokens * sum(_count_multiplied(model, row) for row in rows if row.layers)
    attention = count_flops(model, length, sequences, "full").attention
    head = forward - linear - attention
    # only the head is trained: its input needs a gradient for the final norm alone
    if part.first_block >= layers:
        return head if any(row.component == "norms" for row in part.rows) else 0
    behind = (
        2
        * tokens
        * sum(
            _count_multiplied(model, row)
            // row.num_copies
            * sum(layer >= part.first_block for layer in row.layers)
            for row in rows
            if row.layers
        )
    )
    # Two of attention's products forward have two gradients each.
    scores = 2 * attention * (layers - part.first_block) // layers
    return (
        head
        + behind
        + scores
        - _count_skipped_gradients(model, config, part, tokens, attention // layers)
    )


def _count_skipped_gradients(
    model: ModelConfig, config: FinetuneConfig, part: TrainedPart, tokens: int, attention: int
) -> int:
    """Return what the first block spares where its input and its first norm are frozen, as with
    adapters alone.
    """
    if part.rows:
        return 0
    block = [row for row in list_model_tensors(model) if part.first_block in row.layers]
    reads_stream = [
        row
        for row in block
        if row.shape[-1] == model.hidden_size and not row.name.endswith("o_proj.weight")
    ]
    if config.targets == "feed_forward":
        skipped = [row for row in block if row.component == "attention"]
        skipped += [row for row in reads_stream if row.component in TARGETS["feed_forward"]]
        skipped += [row for row in block if row.component == "router"]
        more = 2 * attention
    else:
        skipped, more = [row for row in reads_stream if row.component == "attention"], 0
    # A's of these matrices read the stream too.
    first_part = TARGETS["feed_forward" if config.targets == "feed_forward" else "attention"]
    # a vector, such as a bias, has none
    adapted = [row for row in reads_stream if row.component in first_part and row.input is not None]
    inputs = sum(
        _count_adapter_products(model, row,
            config.rank) * row.shape[-1] // (row.shape[-1] + row.shape[-2])
        // row.num_copies
        for row in adapted
    )  # fmt: skip
    return more + 2 * tokens * (
        inputs + sum(_count_multiplied(model, row) // row.num_copies for row in skipped)
    )


def estimate_finetuning(
    config: RunConfig,
    wanted: FinetuneConfig,
    result: EstimateOutput,
    device: DeviceProfile | None = None,
) -> FinetuneOutput:
    """Estimate a fine-tuning run from the estimate of the full run.

    Args:
        config: resolved config of a run.
        wanted: what is trained.
        result: what `estimate_run`, or `add_costs`, returned for it.
        device: profile that the result is priced on; None: adapters take no time of their own.

    Returns:
        What is trained and its operations; for a run its memory; with a device its time.

    Raises:
        ConfigError: nothing is trained, or the model has no one stack of blocks.
    """
    model = config.model
    part = select_trained_part(model, wanted)
    total = result.parameters.total
    trained = part.parameters + part.adapters
    flops = count_finetune_flops(
        model, wanted, config.batch.sequences_per_step, config.batch.sequence_length
    )
    work = sum(flops.values()) / result.flops.conventions["full"].forward_backward
    found = FinetuneOutput(
        # every setting counts as given, so that --json prints the defaults too
        settings=FinetuneConfig(**wanted.model_dump()),
        trained_parameters=trained,
        adapter_parameters=part.adapters,
        trained_share=trained / (total + part.adapters),
        flops=FinetuneFlops(total=sum(flops.values()), share_of_full=work, **flops),
    )
    if result.memory is not None:
        memory = _estimate_memory(model, wanted, part, result.memory, total)
        found = found.model_copy(update={"memory": memory})
    if result.time is not None:
        time = result.time
        parts = _estimate_parts(config, wanted, part, flops, time.parts_seconds, time.ranks)
        if device is not None:
            moved = _count_adapter_bytes(config, wanted) / result.time.ranks
            rate = device.memory_bandwidth * device.efficiency.memory
            parts["adapters"] = moved / rate * result.time.residual_factor
        speedup = sum(result.time.parts_seconds.values()) / sum(parts.values())
        seconds = result.time.step_seconds.scale(1 / speedup)
        found = found.model_copy(update={"step_seconds": seconds, "speedup": speedup})
    return found


def _estimate_memory(
    model: ModelConfig,
    wanted: FinetuneConfig,
    part: TrainedPart,
    memory: RankMemory,
    total: int,
) -> FinetuneMemory:
    state = memory.state_bytes
    share = (part.parameters + part.adapters) / total
    kept = {name: state[name] * share for name in STATE_PARTS}
    # A rank's share of the weights is that of the tensors that the optimizer reads.
    ranks_share = (
        state["masters"] / (4 * total) if state["masters"] else state["weights"] / (2 * total)
    )
    frozen = estimate_weight_bytes(model, list_model_tensors(model), wanted.weights) * (
        1 - part.parameters / total
    )
    kept["frozen weights"] = frozen * ranks_share
    reached = (model.num_hidden_layers - part.first_block) / model.num_hidden_layers
    peaks = {}
    for instant in memory.instants:
        size = kept["frozen weights"]
        for name, one in instant.items.items():
            if name in STATE_PARTS:
                size += one * share
            else:
                size += one * (reached if name.startswith("activations saved by blocks") else 1.0)
        peaks[instant.name] = size
    fullest = max(peaks, key=lambda name: peaks[name])
    return FinetuneMemory(state_bytes=kept, peak_bytes=round(peaks[fullest]), peak_instant=fullest)


# Products of fused attention: two forward, and five backward with the scores again (Dao 2022).
ATTENTION_PRODUCTS = (2, 5)
PASSES = ("products", "experts", "attention", "elementwise", "permutation", "recomputation")


def _estimate_parts(
    config: RunConfig,
    wanted: FinetuneConfig,
    part: TrainedPart,
    flops: dict[str, int],
    full: dict[str, float],
    ranks: int,
) -> dict[str, float]:
    """Return the seconds of each part of a step: matmuls by operations, attention by the blocks
    that a gradient reaches, exchanges by what is sent, the optimizer by what it updates.
    """
    model, batch = config.model, config.batch
    count = count_flops(model, batch.sequence_length, batch.sequences_per_step, "full")
    reached = 1 - part.first_block / model.num_hidden_layers
    # Attention has no weights: its backward is spared where nothing is trained, and nowhere else.
    scores = count.attention * (1 + 2 * reached)
    work = (sum(flops.values()) - scores) / (count.forward_backward - 3 * count.attention)
    forward, backward = ATTENTION_PRODUCTS
    share = min(1.0, (part.parameters + part.adapters) / count_parameters(model).total)
    factors = {
        "products": work,
        "experts": work,
        "attention": (forward + backward * reached) / (forward + backward),
        "optimizer": share,
        # Weights are gathered forward and backward, gradients are reduced once.
        "data": (2 + share) / 3,
        "copies": share + (1 - share) * _compute_copied_share(config, ranks),
    }
    parts = {name: seconds * factors.get(name, 1.0) for name, seconds in full.items()}
    # Ranks of a pipeline wait for as long as the passes of others take.
    passes = sum(full.get(name, 0.0) for name in PASSES)
    if passes and "bubble" in full:
        parts["bubble"] *= sum(parts.get(name, 0.0) for name in PASSES) / passes
    return parts


def _compute_copied_share(config: RunConfig, ranks: int) -> float:
    """Return the bytes that data parallelism copies of a frozen weight, over those of a trained
    one.
    """
    layout = config.resolve_layout(ranks)
    size = 4 if config.train.resolved_precision == "fp32" else 2
    micro_batches = compute_micro_batch(config, layout)[1]
    return compute_frozen_share(config.engine, config.model, layout, size, micro_batches)


# A product with few channels is as slow as its reads and writes. Of a matrix of I inputs and O
# outputs, forward: A reads I, B writes O, and the sum with the frozen product reads 2 and writes 1
# of O. Backward: the gradients of B and of its input read O each, that of A reads I, that of the
# input of A writes I, and the sum with the frozen one reads 2 and writes 1 of I.
FORWARD_READS, BACKWARD_READS = (1, 4), (5, 2)


def _count_adapter_bytes(config: RunConfig, wanted: FinetuneConfig) -> float:
    """Return the bytes of 16-bit activations that the adapters of a step read and write, on all
    ranks together.
    """
    batch, moe = config.batch, config.model.moe
    times = 2 if config.train.activation_checkpoint == "full" else 1
    inputs, outputs = (
        times * forward + backward
        for forward, backward in zip(FORWARD_READS, BACKWARD_READS, strict=True)
    )
    channels = 0.0
    for row in iter_adapted_rows(config.model, wanted):
        visits = moe.visits_per_token if row.input == "visit" and moe is not None else 1
        moved = inputs * row.shape[-1] + outputs * row.shape[-2]
        channels += row.num_copies * visits * moved
    return 2 * channels * batch.sequences_per_step * batch.sequence_length
