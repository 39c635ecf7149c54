"""Compare the work of blocks in a dry run with that which follows from the config: which blocks
run, the products of their projections and experts, waits of the host, and tables of positions.

Invariants:
- Every difference names the module, and what was found and expected.
- What has no expectation is listed by name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.dryrun.expected_messages import RankContext
from llmsys.dryrun.expected_passes import ONCE, REPEATED, count_forwards
from llmsys.dryrun.expected_routing import count_routed_rows
from llmsys.dryrun.module_names import replace_layers
from llmsys.dryrun.recorder import DryRunRecorder
from llmsys.dryrun.table_makers import AUTOGRAD
from llmsys.dryrun.wait_check import iter_wait_differences
from llmsys.estimate.rank_parameters import count_tensor_shards, is_in_block

BLOCK = re.compile(r"^(.*?\{i\}(?:\.block)?)\.")
WHOLE_HEADS = ("k_proj", "v_proj")
# Queries of a product of a ring's plain steps: shorter shards have a table of themselves.
RING_CHUNK = 256
# Queries of a product that finds the largest logits, as in model/attention_logits.py.
LOGIT_CHUNK = 512
# Files that make tables of positions by positions where a kernel has one: masks, biases and scores.
TABLE_FILES = (
    "model/attention_mask.py",
    "model/embedding.py",
    "model/lightning_indexer.py",
    "model/mask_builder.py",
    "model/query_stream.py",
    "model/relative_attention.py",
    "model/scaled_dot_product.py",
    "model/segment_memory.py",
)
RING_FILES = ("parallel/ring_attention.py", "parallel/ring_blocks.py")
LOGIT_FILES = ("model/attention_logits.py",)
UNSEEN_TABLES = "tables of positions by positions"


@dataclass(frozen=True)
class BlockCheck:
    """The result of a comparison.

    Attributes:
        differences: Sentences.
        unchecked: Names of what has no expectation.
    """

    differences: tuple[str, ...]
    unchecked: tuple[str, ...]


def check_blocks(
    recorder: DryRunRecorder,
    context: RankContext,
    kernels: Sequence[dict[str, Any]],
    *,
    has_probe: bool = True,
) -> BlockCheck:
    """Compare what blocks did with what their config asks for.

    Args:
        recorder: What was recorded.
        context: The rank and its config.
        kernels: The attention kernels of its layers, see `list_kernels`.
        has_probe: Whether tables of positions by positions were looked for.

    Returns:
        The differences, and what was not compared.
    """
    unchecked = (*_iter_unchecked(context), *(() if has_probe else (UNSEEN_TABLES,)))
    differences = [
        *iter_run_differences(recorder.block_runs, context),
        *_iter_product_differences(recorder.products, context),
        *iter_wait_differences(recorder.waits.list_waits(), context),
        *_iter_table_differences(recorder.squares, context, kernels),
    ]
    return BlockCheck(tuple(differences), unchecked)


def _merge_part(part: str) -> str:
    return part if part == REPEATED else ONCE


def _describe_part(part: str) -> str:
    return "a repeated micro-batch" if part == REPEATED else "the rest of the step"


def count_expected_runs(context: RankContext) -> Counter[tuple[str, str]]:
    """Count the calls of each block in the forward passes of a step.

    Args:
        context: The rank and its config.

    Returns:
        Counts by part of the step and name of the block, such as `blocks.3`.
    """
    calls: dict[str, tuple[int, int]] = {}
    is_reversible = context.config.model.residual.is_reversible
    for row in context.rows:
        found = BLOCK.match(row.name)
        if not is_in_block(row) or found is None:
            continue
        for layer in row.layers:
            stage = context.find_stage(layer if row.name.startswith("blocks.") else None)
            name = found[1].replace("{i}", str(layer))
            calls[name] = (stage, 2 if is_reversible else row.steps)
    expected: Counter[tuple[str, str]] = Counter()
    for (part, stage), count in count_forwards(context.passes).items():
        for name, (own, each) in calls.items():
            if own == stage:
                expected[part, name] += count * each
    return expected


def iter_run_differences(recorded: Counter[tuple[str, str]], context: RankContext) -> Iterator[str]:
    """Find the blocks that forward passes skip or repeat.

    Args:
        recorded: Runs by part of the step and name of the block.
        context: The rank and its config.

    Yields:
        A sentence for each of them and part of the step.
    """
    if context.config.model.rnn is not None:
        return
    expected = count_expected_runs(context)
    found: Counter[tuple[str, str]] = Counter()
    for (part, name), count in recorded.items():
        found[_merge_part(part), name] += count
    for part, name in dict.fromkeys([*expected, *found]):
        runs, wanted = found[part, name], expected[part, name]
        if runs != wanted:
            yield (
                f"{'skipped' if runs < wanted else 'repeated'} block: {name} runs {runs} times in "
                f"the forward passes of {_describe_part(part)}, expected {wanted}"
            )


def count_expected_products(context: RankContext) -> Counter[tuple[str, str]]:
    """Count the FLOPs of the projections and experts of blocks in the forward passes of a step.

    Args:
        context: The rank and its config.

    Returns:
        FLOPs by part of the step and name of the module, in which `*` stands for the layer.
    """
    forwards = count_forwards(context.passes)
    moe = context.config.model.moe
    routed = 0 if moe is None else count_routed_rows(context, moe)
    expected: Counter[tuple[str, str]] = Counter()
    for row in context.rows:
        if not _has_known_products(context, row):
            continue
        name = replace_layers(row.name.replace("{i}", "0").rpartition(".")[0])
        each = 2 * row.steps * _count_multiplications(context, row, routed)
        for layer in row.layers:
            stage = context.find_stage(layer if row.name.startswith("blocks.") else None)
            for (part, own), count in forwards.items():
                expected[part, name] += count * each * (own == stage)
    return expected


def _has_known_products(context: RankContext, row: ParameterTensor) -> bool:
    """Return whether a row is a matrix of a projection or of experts whose vectors are known."""
    if not is_in_block(row) or not row.layers or len(row.shape) < 2 or row.name.endswith("bias"):
        return False
    train = context.config.train
    if row.is_routed:
        return row.input == "visit" and train.expert_matmul_dtype == "compute"
    return (
        row.input == "token"
        and row.name.endswith("_proj.weight")
        and train.matmul_dtype == "compute"
        and _has_plain_attention(context)
    )


def _has_plain_attention(context: RankContext) -> bool:
    """Return whether every projection of a block takes the tokens of a row and nothing else."""
    config = context.config
    return (
        isinstance(config.model.attention, MultiHeadAttentionConfig | LatentAttentionConfig)
        and not config.model.has_python_blocks
        and config.model.family != "encoder_decoder"
        and config.model.position.kind != "transformer_xl"
        and config.objective.kind != "permutation"
    )


def _count_multiplications(context: RankContext, row: ParameterTensor, routed: int) -> int:
    """Count the elements that the vectors of a micro-batch are multiplied with, in one block."""
    if row.is_routed:
        return routed * prod(row.shape[1:])
    layout = context.layout
    tokens = context.sequences * context.length // layout.context
    parts = count_tensor_shards(row, layout, context.config.model)
    module = row.name.rpartition(".")[0].rpartition(".")[2]
    # A rank that has a whole matrix multiplies its own positions with it, but all positions with
    # one of the key-value heads that the tensor ranks do not divide.
    if parts == 1 and module not in WHOLE_HEADS:
        tokens //= layout.tensor
    elif parts == 1 and layout.tensor > 1:
        parts = context.config.model.num_key_value_heads
    return tokens * row.elements_per_copy // parts


def _iter_product_differences(
    recorded: Counter[tuple[str, str]], context: RankContext
) -> Iterator[str]:
    expected = count_expected_products(context)
    found: Counter[tuple[str, str]] = Counter()
    for (part, name), flops in recorded.items():
        found[_merge_part(part), name] += flops
    for (part, name), wanted in expected.items():
        flops = found[part, name]
        if flops == wanted:
            continue
        rows = ""
        if name.endswith(".experts") and wanted:
            rows = (
                f", as many as {flops / wanted:.3f} times the rows that tokens are routed to; rows "
                "that nobody routed are padding"
            )
        yield (
            f"{'too few' if flops < wanted else 'unneeded'} products: {name} computes {flops:,} "
            f"FLOPs in the forward passes of {_describe_part(part)}, expected {wanted:,}{rows}"
        )


def _iter_table_differences(
    squares: Counter[tuple[str, str, str]], context: RankContext, kernels: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield tables that no kernel of the decision table asks for."""
    files = set(_iter_table_files(context, kernels))
    for (owner, tensor, maker), count in squares.items():
        # What only autograd asks for follows from the tables of a forward.
        if files and (maker == AUTOGRAD or maker.partition(":")[0] in files):
            continue
        yield (
            f"table of positions by positions: {owner or 'the model'} makes {tensor}, {count} "
            f"times in a micro-batch ({maker}), and no attention kernel of the layers needs one"
        )


def _iter_table_files(context: RankContext, kernels: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the files of llmsys that make tables for the kernels of these layers."""
    if any(one["has_table"] for one in kernels):
        yield from TABLE_FILES
    if context.layout.ring_size > 1 and _has_short_scores(context, RING_CHUNK):
        yield from RING_FILES
    has_limit = context.config.optimizer.max_attention_logit is not None
    if has_limit and _has_short_scores(context, LOGIT_CHUNK):
        yield from LOGIT_FILES


def _has_short_scores(context: RankContext, queries: int) -> bool:
    """Return whether scores of so many queries at a time are those of all positions of a rank."""
    # A probe has at least half of the positions.
    return context.length // context.layout.ring_size < 2 * queries


def _iter_unchecked(context: RankContext) -> Iterator[str]:
    model = context.config.model
    if model.rnn is not None:
        yield "runs of recurrent cells"
    has_projections = any(row.name.endswith("_proj.weight") for row in context.rows)
    train = context.config.train
    if has_projections and not _has_plain_attention(context):
        yield f"products of projections with {_describe_inputs(context)}"
    if train.matmul_dtype != "compute":
        yield f"products of projections in {train.matmul_dtype}"
    if model.moe is not None and train.expert_matmul_dtype != "compute":
        yield f"products of experts in {train.expert_matmul_dtype}"


def _describe_inputs(context: RankContext) -> str:
    config = context.config
    if config.model.family == "encoder_decoder":
        return "an encoder and a decoder"
    if config.objective.kind == "permutation":
        return "a query stream"
    if config.model.position.kind == "transformer_xl":
        return "scores of distances"
    if config.model.has_python_blocks:
        return "blocks of your own"
    return f"attention of kind {config.model.attention.kind}"
