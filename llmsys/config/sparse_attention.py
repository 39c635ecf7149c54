"""Sparse attention of DeepSeek-V3.2 (`model.attention.sparse`; arXiv:2512.02556, 2.1): a lightning
indexer beside latent attention, which chooses the keys of each query.

Its module is in llmsys/model/lightning_indexer.py. Fields have Hugging Face's names.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    ParameterTensor,
    SavedTensor,
)
from llmsys.config.norm import LayerNormConfig
from llmsys.config.section import Section
from llmsys.errors import Violation

NAME = "attention.indexer"


class SparseAttentionConfig(Section):
    """Every query attends to the `index_topk` visible keys that score highest in an indexer: a sum
    over heads of a weight times relu(query · key).

    The indexer learns to predict the attention weights by a loss of its own, on inputs without a
    gradient; the rest of the model learns by the language loss alone.
    """

    phase: Literal["warm_up", "sparse"] = Field(
        "sparse",
        description="warm_up: attend to all keys, and train the indexer on all of them. sparse: "
        "attend to the chosen keys, and train it on those.",
    )
    index_topk: int = Field(2048, ge=1, description="Keys of a query.")
    index_n_heads: int = Field(64, ge=1, description="Query heads of the indexer; one key.")
    index_head_dim: int = Field(
        128, ge=2, description="Channels of a head; the first qk_rope_head_dim are rotated."
    )
    pairing: Literal["halves", "neighbours"] = Field(
        "halves",
        description="Channels that the indexer rotates together, as in position.pairing: halves "
        "in DeepSeek-V3.2, neighbours in GLM-5.",
    )
    loss_weight: float = Field(
        1.0,
        gt=0,
        description="Weight of the indexer's loss: the KL divergence of its softmax from the mean "
        "attention weights of all heads, per token, summed over layers.",
    )

    def iter_parameters(self, model: ModelShape, query_rank: int) -> Iterator[ParameterTensor]:
        """Yield the projections of the indexer and the norm of its keys.

        Args:
            model: widths of the model.
            query_rank: channels of the query latent, from which its queries are projected.
        """
        heads, width = self.index_n_heads, self.index_head_dim
        for name, outputs, inputs in (
            ("q_b_proj", heads * width, query_rank),
            ("k_proj", width, model.hidden_size),
            ("weights_proj", heads, model.hidden_size),
        ):
            # Its inputs get no gradient: one product less in the backward pass.
            yield ParameterTensor(
                f"{NAME}.{name}.weight",
                (outputs, inputs),
                "attention",
                input="token",
                cut_steps=1,
            )
        yield from LayerNormConfig().iter_parameters(f"{NAME}.k_norm", width)

    def count_kernel_pairs(self, length: int, documents: Sequence[int] | None) -> int:
        """Return the pairs of a row that attention counts.

        Args:
            length: positions of the row.
            documents: lengths of its documents, to count the chosen pairs; None: all of them, which
                a kernel with a table computes.
        """
        if documents is None:
            return length**2
        top = max(documents) if self.phase == "warm_up" else self.index_topk
        return sum(_count_recent_pairs(one, top) for one in documents)

    def count_index_products(self, length: int, documents: Sequence[int] | None) -> int:
        """Return the multiplications of the indexer's scores of a row: of queries and keys, and of
        weights and heads.

        Args:
            length: positions of the row.
            documents: lengths of its documents, to count visible pairs; None: all pairs.
        """
        pairs = (
            length**2
            if documents is None
            else sum(_count_recent_pairs(one, one) for one in documents)
        )
        return pairs * self.index_n_heads * (self.index_head_dim + 1)

    def iter_saved_tensors(self, shape: ActivationShape) -> Iterator[SavedTensor]:
        """Yield the saved tensors of the indexer and of its loss.

        Args:
            shape: the micro-batch of one rank.
        """
        bytes_of, pairs = shape.compute_residual_bytes, shape.sequences * shape.length**2
        heads, width = self.index_n_heads, self.index_head_dim
        is_wide = shape.value_bytes == FP32_BYTES
        yield SavedTensor("indexer queries", bytes_of(heads * width), "product", is_saved=False)
        yield SavedTensor("indexer keys", bytes_of(width), "product")
        yield SavedTensor("indexer head weights", bytes_of(heads), "product", is_saved=False)
        yield from LayerNormConfig().iter_saved_tensors("indexer keys", width, shape)
        for name, channels in (("queries", heads * width), ("keys", width), ("weights", heads)):
            yield SavedTensor(
                f"float32 indexer {name}",
                bytes_of(channels, FP32_BYTES),
                "pointwise" if is_wide else "fused",
            )
        yield SavedTensor("scores of indexer heads", heads * pairs * FP32_BYTES, "pointwise")
        yield SavedTensor("scores, gradient of the indexer's loss", pairs * FP32_BYTES, "pointwise")


def _count_recent_pairs(length: int, top: int) -> int:
    """Return the pairs of a document whose queries see up to `top` of the keys so far."""
    reach = min(length, top)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def find_sparse_violations(
    sparse: SparseAttentionConfig | None,
    query_rank: int | None,
    rotated: int,
    family: str,
    given: Mapping[str, str | None],
    layer_types: Sequence[str],
) -> Iterator[Violation]:
    """Yield what an indexer cannot be combined with, with keys below `model`.

    Args:
        sparse: `model.attention.sparse`; nothing is yielded without it.
        query_rank: `model.attention.q_lora_rank`.
        rotated: `model.attention.qk_rope_head_dim`.
        family: `model.family`.
        given: kinds by the dotted keys of choices of which only the usual one is proven.
        layer_types: `model.layer_types`.
    """
    if sparse is None:
        return
    if query_rank is None:
        yield Violation(
            "attention.q_lora_rank",
            "null has no query latent, from which the queries of attention.sparse are projected. "
            "Set a rank, such as 1536, or leave sparse out.",
        )
    if sparse.index_head_dim < rotated:
        yield Violation(
            "attention.sparse.index_head_dim",
            f"{sparse.index_head_dim} channels have no room for the qk_rope_head_dim={rotated} "
            f"rotated ones. Use {rotated} or more.",
        )
    if family != "decoder":
        yield Violation(
            "attention.sparse",
            f"family={family} has queries that see later keys, among which an indexer is not "
            "proven to choose. Use family=decoder, or leave sparse out.",
        )
    if "sliding_attention" in layer_types:
        yield Violation(
            "layer_types",
            "sliding_attention is not proven with attention.sparse, which chooses among all keys. "
            "Use full_attention, or leave sparse out.",
        )
    for key, value in given.items():
        if value not in (None, "standard"):
            yield Violation(
                key, f"{value} is not proven with attention.sparse. Leave {key} or sparse out."
            )
