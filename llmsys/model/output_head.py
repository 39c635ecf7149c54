"""Output heads: hidden states to logits, and the modules on the first token (pooler,
classifier).
"""

from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.head import (
    ClassificationHeadConfig,
    FeaturesHeadConfig,
    LmHeadConfig,
    MlmHeadConfig,
    PermutationHeadConfig,
)
from llmsys.config.model import ModelConfig
from llmsys.config.parametrization_factors import compute_head_factor
from llmsys.model.feed_forward import apply_activation
from llmsys.model.float32_buffers import Float32BufferModule
from llmsys.model.normalization import build_norm
from llmsys.model.query_stream import MaskEmbedding

# B rows, T positions, D width, V vocabulary


class LmHead(Float32BufferModule):
    """Logits over the vocabulary: softcap(scale · hidden Wᵀ + bias). W is the token embedding
    when tied.
    """

    fixed_bias_V: Tensor
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, head: LmHeadConfig) -> None:
        super().__init__()
        self.softcap = head.softcap
        inverse_sqrt = head.scale == "inverse_sqrt_hidden_size"
        self.scale = config.hidden_size**-0.5 if inverse_sqrt else float(head.scale)
        self.scale *= compute_head_factor(config)
        self.weight = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
        )
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(config.vocab_size)) if head.bias == "trained" else None
        )
        if head.bias == "fixed":
            self.register_buffer("fixed_bias_V", torch.zeros(config.vocab_size))
        self.has_fixed_bias = head.bias == "fixed"

    def reset_buffers(self) -> None:
        """Set the fixed bias to zero, for instance after `to_empty`; a checkpoint fills it."""
        if self.has_fixed_bias:
            self.fixed_bias_V.zero_()

    def prepare_hidden(self, x_BTD: Tensor) -> Tensor:
        """Return the input of the weight product."""
        # Before the product: hidden states are fewer numbers than logits.
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the logits.

        Args:
            x_BTD: last states of the stack.

        Returns:
            (B, T, V) in the dtype of the weights.
        """
        logits_BTV = F.linear(self.prepare_hidden(x_BTD), self.weight, self.bias)
        if self.has_fixed_bias:
            logits_BTV = logits_BTV + self.fixed_bias_V.to(logits_BTV.dtype)
        if self.softcap is not None:
            logits_BTV = self.softcap * torch.tanh(logits_BTV / self.softcap)
        return logits_BTV


class MlmHead(nn.Module):
    """norm(activation(dense(hidden))) Wᵀ + bias (Devlin 2018; BERT's released code). W is
    usually tied.
    """

    def __init__(self, config: ModelConfig, head: MlmHeadConfig) -> None:
        super().__init__()
        self.kind = head.activation
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = build_norm(config, config.hidden_size)
        self.weight = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
        )
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def prepare_hidden(self, x_BTD: Tensor) -> Tensor:
        """Return the input of the weight product."""
        prepared_BTD: Tensor = self.norm(apply_activation(self.kind, self.dense(x_BTD)))
        return prepared_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the logits of every position.

        Args:
            x_BTD: last states of the stack.

        Returns:
            (B, T, V) in the dtype of the weights.
        """
        return F.linear(self.prepare_hidden(x_BTD), self.weight, self.bias)


class NextSentenceHead(nn.Linear):
    """BERT's two logits from the pooled vector: the second segment follows the first (0), or it
    does not (1).

    Attributes:
        is_trained: Whether the objective has this loss. Otherwise its weights and the pooler's have
            no gradients.
        nats_sum: Loss of the step so far, summed over labelled rows.
        num_correct: Labelled rows whose likelier logit is right.
        num_pairs: Labelled rows.
    """

    nats_sum: Tensor
    num_correct: Tensor
    num_pairs: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, 2)
        self.is_trained = False
        self._nats: Tensor | None = None
        for name in ("nats_sum", "num_correct", "num_pairs"):
            self.register_buffer(name, torch.zeros(()), persistent=False)

    def record_loss(self, pooled_BD: Tensor, labels_B: Tensor) -> None:
        """Keep the loss of a forward pass, and add it to the counters. Negative labels are left
        out.
        """
        logits_B2 = self(pooled_BD).float()
        self._nats = F.cross_entropy(logits_B2, labels_B, reduction="sum")
        with torch.no_grad():
            self.nats_sum += self._nats
            self.num_correct += (logits_B2.argmax(-1) == labels_B).sum()
            self.num_pairs += (labels_B >= 0).sum()

    def take_loss(self) -> Tensor:
        """Return the loss of the last training forward in nats, summed over labelled rows, once."""
        nats = self._nats
        self._nats = None
        if nats is None:
            raise RuntimeError(
                "no training forward with next_sentence_B has run since the last call"
            )
        return nats

    def get_step_counters(self) -> tuple[Tensor, ...]:
        """Return the counters of the step so far: nats, correct rows, rows. The buffers
        themselves, not copies.
        """
        return self.nats_sum, self.num_correct, self.num_pairs

    def reset_buffers(self) -> None:
        """Set the counters to zero, after a step or after `to_empty`."""
        for counter in self.get_step_counters():
            counter.zero_()


def build_head(config: ModelConfig) -> nn.Module | None:
    """Build the map from hidden states to logits over the vocabulary.

    Args:
        config: The model.

    Returns:
        A module that maps (B, T, D) to (B, T, V). None for a classifier or features, whose
        outputs are in `build_extras`.
    """
    match config.head:
        case LmHeadConfig() as head:
            return LmHead(config, head)
        case MlmHeadConfig() as head:
            return MlmHead(config, head)
        case ClassificationHeadConfig() | FeaturesHeadConfig():
            return None
        case PermutationHeadConfig():
            return LmHead(config, LmHeadConfig(bias="trained"))
        case unreachable:
            assert_never(unreachable)


def get_next_sentence_head(model: nn.Module) -> NextSentenceHead:
    """Return the next-sentence head of a model.

    Args:
        model: A model with `head.next_sentence`.

    Returns:
        Its head.
    """
    head = model.get_submodule("next_sentence")
    assert isinstance(head, NextSentenceHead)
    return head


def build_extras(config: ModelConfig) -> dict[str, nn.Module]:
    """Build the modules that only some heads have.

    Args:
        config: The model.

    Returns:
        By attribute name of the model: `pooler`, `next_sentence`, `classifier`, or XLNet's
        `mask_embedding`. Checkpoints have their parameters under these names.
    """
    width = config.hidden_size
    match config.head:
        case ClassificationHeadConfig(num_labels=num_labels, pooling=pooling):
            dense: dict[str, nn.Module] = (
                {"pooler": nn.Linear(width, width)} if pooling is None else {}
            )
            return dense | {"classifier": nn.Linear(width, num_labels)}
        case MlmHeadConfig() as head:
            pooler: dict[str, nn.Module] = (
                {"pooler": nn.Linear(width, width)} if head.pooler else {}
            )
            return pooler | (
                {"next_sentence": NextSentenceHead(width)} if head.next_sentence else {}
            )
        case FeaturesHeadConfig() as head:
            return {"pooler": nn.Linear(width, width)} if head.pooler else {}
        case PermutationHeadConfig():
            return {"mask_embedding": MaskEmbedding(width)}
        case LmHeadConfig():
            return {}
        case unreachable:
            assert_never(unreachable)


def pool_positions(
    x_BTD: Tensor, pooling: Literal["first", "mean"], real_BT: Tensor | None
) -> Tensor:
    """Pool the hidden states of each sequence into one vector.

    Args:
        x_BTD: Hidden states.
        pooling: The first position, or the mean over positions.
        real_BT: False at padding, which a mean leaves out. None: no padding.

    Returns:
        (B, D).
    """
    if pooling == "first":
        return x_BTD[:, 0]
    if real_BT is None:
        return x_BTD.mean(1)
    weights_BT1 = real_BT[..., None].to(x_BTD.dtype)
    return (x_BTD * weights_BT1).sum(1) / weights_BT1.sum(1).clamp(min=1)
