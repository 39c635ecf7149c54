"""Tiny models and windows for parity checks, chosen to exercise what goes wrong.

A vocabulary and rows that no number of ranks divides, tied embeddings, an expert without tokens,
all tokens on one expert, every balance loss, padding, and a rank without valid targets.

A user's model is tried with its dropout off, on the doctor's own rows.

Invariants:
- Only dropout changes: ranks draw other random numbers than one process does.
- A model that does not fit into this machine's memory is rejected before a process starts.
"""

from dataclasses import dataclass, field
from typing import Any, assert_never

import numpy as np
import torch

from llmsys.config.head import (
    ClassificationHeadConfig,
    DropoutConfig,
    FeaturesHeadConfig,
    LmHeadConfig,
    MlmHeadConfig,
    PermutationHeadConfig,
)
from llmsys.config.model import ModelConfig
from llmsys.config.objective import NextSentenceConfig, ObjectiveConfig, infer_objective
from llmsys.data.batch import IGNORED, Batch, build_batch
from llmsys.data.packed_windows import PADDING, WindowBatch
from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.errors import ConfigError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.train.auto_micro_batch import get_free_memory
from llmsys.vocabulary.chat_tokens import StoredChats

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 61

# B sequences, T positions


@dataclass(frozen=True)
class ParityModel:
    """A model, and the bias added to the choice of each expert in every layer.

    Attributes:
        learns_answers: the rows are chats, of which some tokens have a loss.
    """

    name: str
    model: ModelConfig
    expert_bias: dict[int, float] = field(default_factory=dict)
    learns_answers: bool = False

    @property
    def objective(self) -> ObjectiveConfig:
        """The objective that the model is made for: every loss that its heads have."""
        head = self.model.head
        has_pairs = (
            head.kind == "mlm" and head.next_sentence and self.model.embedding.token_types > 1
        )
        return NextSentenceConfig() if has_pairs else infer_objective({"model": self.model})

    @property
    def has_windows(self) -> bool:
        """True for windows of one length; False for pairs and labelled texts."""
        return self.objective.uses_windows

    @property
    def length(self) -> int:
        """Positions of a window, or of the longest source, target or text."""
        return min(LENGTH, self.model.max_position_embeddings)


def _build_model_config(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.1,
    }
    return ModelConfig.model_validate(settings | changes)


def _build_moe_config(per_token: int, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "score": "sigmoid",
        "balance": {"kind": "bias"},
    }
    return settings | changes


_LATENT = {
    "kind": "latent",
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_SEQUENCE_LOSS = {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"}
_BATCH_LOSS = {"kind": "auxiliary_loss", "weight": 0.5, "scope": "batch"}
_BIAS_AND_LOSS = {"kind": "bias", "rate": 0.01, "sequence_weight": 0.5}
_CAPACITY = {"kind": "capacity", "factor": 0.7}
_BY_DOCUMENT = _CAPACITY | {"scope": "document"}

DENSE = ParityModel("dense, tied", _build_model_config(tie_word_embeddings=True))
EXPERTS = ParityModel("experts", _build_model_config(moe=_build_moe_config(2)))
IDLE = ParityModel("experts, one idle", _build_model_config(moe=_build_moe_config(2)), {3: -10.0})
CROWDED = ParityModel(
    "experts, all on one", _build_model_config(moe=_build_moe_config(1)), {2: 10.0}
)
LATENT = ParityModel(
    "experts, softmax, batch loss, latent attention, multi-token prediction",
    _build_model_config(
        attention=_LATENT,
        num_key_value_heads=4,
        multi_token_prediction={"depth": 2, "weight": 0.3},
        moe=_build_moe_config(2, score="softmax", balance=_BATCH_LOSS, z_loss_weight=0.1),
    ),
)
SINKS = ParityModel(
    "experts, softmax, sequence loss, capacity by document, sinks",
    _build_model_config(
        attention={"kind": "multi_head", "sinks": True},
        moe=_build_moe_config(
            2, score="softmax", balance=_SEQUENCE_LOSS, routing=_BY_DOCUMENT, z_loss_weight=0.1
        ),
    ),
)
TRANSLATION = ParityModel(
    "translation, experts, bias and loss, capacity",
    _build_model_config(
        family="encoder_decoder",
        moe=_build_moe_config(2, balance=_BIAS_AND_LOSS, routing=_CAPACITY, z_loss_weight=0.1),
    ),
)
LABELS = ParityModel(
    "labels, experts, batch loss",
    _build_model_config(
        family="encoder",
        head={"kind": "classification", "num_labels": 3},
        moe=_build_moe_config(2, score="softmax", balance=_BATCH_LOSS, z_loss_weight=0.1),
    ),
)
MASKED = ParityModel(
    "masked, experts, sequence loss, capacity",
    _build_model_config(
        family="encoder",
        head={"kind": "mlm"},
        moe=_build_moe_config(
            2, score="softmax", balance=_SEQUENCE_LOSS, routing=_CAPACITY, z_loss_weight=0.1
        ),
    ),
)
DEEP = ParityModel(
    "four layers, first dense, tied, latent attention, multi-token prediction, bias and loss",
    _build_model_config(
        num_hidden_layers=4,
        tie_word_embeddings=True,
        attention=_LATENT,
        num_key_value_heads=4,
        multi_token_prediction={"depth": 1, "weight": 0.3},
        moe=_build_moe_config(2, balance=_BIAS_AND_LOSS, first_dense_layers=1, z_loss_weight=0.1),
    ),
)
NARROW = ParityModel(
    "eight narrow layers, two dense, then experts",
    _build_model_config(
        num_hidden_layers=8,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        moe=_build_moe_config(2, first_dense_layers=2, moe_intermediate_size=8),
    ),
)
# Not of the matrix: the loss is on some tokens, which rows of padding have too.
CHATS = ParityModel("answers of chats", EXPERTS.model, learns_answers=True)
PARITY_MODELS = (
    DENSE,
    EXPERTS,
    IDLE,
    CROWDED,
    LATENT,
    SINKS,
    TRANSLATION,
    LABELS,
    MASKED,
    DEEP,
    NARROW,
)


def build_parity_batch(step: int, rows: range, parity_model: ParityModel = DENSE) -> Batch:
    """Return rows of a step, the same on every rank.

    The first quarter has no valid target, one row in four has two documents, and one in four ends
    in padding.
    """
    length, padding = parity_model.length, max(1, parity_model.length // 4)
    stored = np.stack(
        [_build_row_tokens(step, row, length, parity_model.model.vocab_size) for row in rows]
    )
    if parity_model.learns_answers:
        return _build_chats(stored, np.array(rows), parity_model.model.vocab_size)
    tokens = torch.tensor(stored)
    tokens_BT, targets_BT = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    documents_BT = torch.zeros_like(tokens_BT)
    for place, row in enumerate(rows):
        if row < SEQUENCES // 4:
            targets_BT[place] = IGNORED
        if row % 4 == 2:
            documents_BT[place, length // 2 :] = 1
        if row % 4 == 3:
            documents_BT[place, -padding:] = PADDING
            targets_BT[place, -padding:] = IGNORED
    return Batch(tokens_BT, targets_BT, documents_BT)


def _build_chats(ids_NT: Any, rows_N: Any, vocab_size: int) -> Batch:
    """Return rows of two chats, of whose tokens two in five have a loss, with padding in every
    second row.
    """
    size = ids_NT.shape[1]
    has_loss = (np.arange(size) + rows_N[:, None]) % 5 < 2
    stored = np.where(has_loss, ids_NT, ids_NT + vocab_size)
    documents = np.repeat((np.arange(size) >= size // 2)[None], len(rows_N), axis=0).astype(
        np.int64
    )
    stored[:, [0, size // 2]] = 2 * vocab_size
    documents[rows_N % 2 == 1, -3:] = PADDING
    return build_batch(
        WindowBatch(stored, documents), separate_documents=True, chats=StoredChats(vocab_size, 0)
    )


def _build_row_tokens(step: int, row: int, length: int, vocab_size: int) -> Any:
    order = build_permutation(vocab_size, derive_order_key("doctor", step, row))
    return order[np.arange(length + 1) % vocab_size]


# fp32 copies of all weights. The reference run: weights, gradients, two moments, start, first
# gradients. A rank: its state (5, one a copy in 16 bits), the reference trajectory and its own (5
# each), and the changes of both (2).
REFERENCE_COPIES, RANK_COPIES = 6, 17

FP32_BYTES = 4


def build_parity_model(model: ModelConfig, name: str) -> ParityModel:
    """Build the parity model of a user's model, with dropout off.

    Args:
        model: the model config.
        name: name of the case in the table.

    Returns:
        The parity model, without expert bias.

    Raises:
        ConfigError: the model has no head that learns, or too small a vocabulary.
    """
    match model.head:
        case FeaturesHeadConfig():
            raise ConfigError(
                f"model.head.kind=features of {name} has no loss, but parity compares training. "
                "Use model.head.kind=lm, mlm or classification."
            )
        case (
            LmHeadConfig() | MlmHeadConfig() | ClassificationHeadConfig() | PermutationHeadConfig()
        ):
            pass
        case unreachable:
            assert_never(unreachable)
    if model.vocab_size < 4:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} of {name} is too small for rows of parity. Use "
            "model.vocab_size=4."
        )
    return ParityModel(name, model.model_copy(update={"dropout": DropoutConfig()}))


def require_memory(model: ModelConfig, ranks: int) -> None:
    """Check that parity of a model fits into the free memory of this machine.

    Args:
        model: the model config.
        ranks: number of processes.

    Raises:
        ConfigError: it takes more memory than is free.
    """
    parameters = count_parameters(model).total
    needed = parameters * FP32_BYTES * (REFERENCE_COPIES + RANK_COPIES * ranks)
    if needed > (free := get_free_memory()):
        raise ConfigError(
            f"Parity of {parameters:,} parameters on {ranks} processes takes about "
            f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free. Use fewer --processes, or "
            "a smaller model of the same kind: override model.num_hidden_layers, "
            "model.hidden_size or model.moe.num_experts."
        )
