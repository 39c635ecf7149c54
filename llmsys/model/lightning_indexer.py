"""The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, 2.1): scores of all
keys, the choice of the highest, and the loss by which the scores learn.

Plain products in float32: every pair of a query and a key has a score, in memory too. FP8 scores
and the Hadamard rotation before them, which change no product, belong to kernels and are not here.

Invariants:
- Inputs are detached, so the loss of the indexer reaches its own parameters only, and the language
  loss none of them.
- Of equal scores the earlier key is chosen, whatever else a row holds: a document gets the same
  keys alone, packed and continued from a cache.
- Losses are sums over real tokens; the caller divides by those of all ranks and micro-batches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.sparse_attention import SparseAttentionConfig
from llmsys.model.attention_mask import AttentionMask
from llmsys.model.float32_buffers import Float32BufferModule
from llmsys.model.forward_context import ForwardContext
from llmsys.model.load_balancing import add_step_counts, is_recomputation

# B rows, T query positions, S key positions, D width, C width of the query latent, I heads of the
# indexer, K channels of one, H heads of attention, L channels of a query of attention

NORM_EPS = 1e-6  # not a field of any config.json


class LightningIndexer(Float32BufferModule):
    """score(t, s) = Σ_i w_ti · relu(q_ti · k_s) / sqrt(I · K) (equation 1); all heads share a
    key.
    """

    loss_sum: Tensor
    num_tokens: Tensor

    def __init__(
        self, config: ModelConfig, sparse: SparseAttentionConfig, query_rank: int, layer: int
    ) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and rotation of the model.
            sparse: Heads, keys of a query, phase and weight of the loss.
            query_rank: Channels of the query latent.
            layer: Index of the layer: it decides on rotation, and names the keys in a cache.
        """
        super().__init__()
        self.layer = layer
        self.layer_type = config.get_layer_type(layer)
        self.rotates = config.uses_rope(layer)
        self.sparse = sparse
        heads, width = sparse.index_n_heads, sparse.index_head_dim
        self.q_b_proj = nn.Linear(query_rank, heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self._loss: tuple[Tensor, Tensor] | None = None
        for name in ("loss_sum", "num_tokens"):
            self.register_buffer(name, torch.zeros(()), persistent=False)

    @property
    def selects(self) -> bool:
        """False in warm-up, when attention sees all visible keys."""
        return self.sparse.phase == "sparse"

    def compute_scores(self, x_BTD: Tensor, latent_BTC: Tensor, context: ForwardContext) -> Tensor:
        """Score all keys so far for each query, and append the new keys to the cache.

        Args:
            x_BTD: The input of attention.
            latent_BTC: Its query latent, normed.
            context: Rotation and cache that all layers share.

        Returns:
            float32 (B, T, S), hidden keys included.
        """
        x_BTD = x_BTD.detach()
        q_BTIK = self.q_b_proj(latent_BTC.detach()).unflatten(-1, (self.sparse.index_n_heads, -1))
        k_BTK = self.k_norm(self.k_proj(x_BTD))
        rotation = context.rotations.get(self.layer_type) if self.rotates else None
        if rotation is not None:
            rotation = rotation.to_pairing(self.sparse.pairing)
            q_BTIK = rotation(q_BTIK)
            k_BTK = rotation(k_BTK.unsqueeze(2)).squeeze(2)
        k_BSK = k_BTK
        if context.cache is not None:
            (k_BSK,) = context.cache.append_layer(f"indexer {self.layer}", k_BTK)
        scale = (self.sparse.index_n_heads * self.sparse.index_head_dim) ** -0.5
        weights_BTI = self.weights_proj(x_BTD).float() * scale
        products_BXS = q_BTIK.flatten(1, 2).float() @ k_BSK.transpose(1, 2).float()
        positive_BTIS = F.relu(products_BXS).unflatten(1, q_BTIK.shape[1:3])
        scores_BTS: Tensor = (weights_BTI.unsqueeze(2) @ positive_BTIS).squeeze(2)
        return scores_BTS

    @torch.no_grad()
    def select_keys(self, scores_BTS: Tensor, visible_BTS: Tensor) -> Tensor:
        """Choose the keys that attention sees.

        Args:
            scores_BTS: From `compute_scores`.
            visible_BTS: False where the mask of the layer hides a key.

        Returns:
            bool (B, T, S): in warm-up and where there are no more than `index_topk` keys, those
            that are visible.
        """
        top = self.sparse.index_topk
        if not self.selects or top >= scores_BTS.shape[-1]:
            return visible_BTS
        merit_BTS = scores_BTS.masked_fill(~visible_BTS, -torch.inf)
        # A stable sort, since relu gives many keys the score 0.
        best_BTS = merit_BTS.argsort(dim=-1, descending=True, stable=True)[..., :top]
        return torch.zeros_like(visible_BTS).scatter_(-1, best_BTS, True) & visible_BTS

    def record_loss(
        self,
        scores_BTS: Tensor,
        q_BTHL: Tensor,
        k_BSHL: Tensor,
        mask: AttentionMask,
        scale: float,
        real_BT: Tensor | None,
    ) -> None:
        """Keep the loss of a training forward, and add it to the counters of the step.

        A pass that activation checkpointing repeats computes it for its saved tensors only.

        Args:
            scores_BTS: From `compute_scores`.
            q_BTHL: Queries of attention.
            k_BSHL: Keys of attention.
            mask: The keys that attention sees.
            scale: Factor on the scores of attention.
            real_BT: False at padding, which has no loss. None: no padding.
        """
        shown_BTS = expand_visible_keys(mask, scores_BTS)
        shares_BTS = compute_attention_shares(q_BTHL, k_BSHL, shown_BTS, scale)
        if real_BT is None:
            real_BT = torch.ones_like(shown_BTS[..., 0])
        loss: Tensor = _DivergenceFunction.apply(  # type: ignore[no-untyped-call]
            scores_BTS, shares_BTS, shown_BTS, real_BT
        )
        if is_recomputation():
            return
        num_tokens = real_BT.sum()
        self._loss = (self.sparse.loss_weight * loss, num_tokens)
        add_step_counts(list(self.get_step_counters()), [loss.detach(), num_tokens])

    def compute_auxiliary_loss(self) -> Tensor:
        """Return the weighted loss of the last training forward, a mean over real tokens; 0
        without any.
        """
        total = self.sum_auxiliary_losses()
        return total if self._loss is None else total / self._loss[1].clamp(min=1)

    def sum_auxiliary_losses(self) -> Tensor:
        """Return the weighted loss of the last training forward, a sum over real tokens."""
        return torch.zeros_like(self.loss_sum) if self._loss is None else self._loss[0]

    def get_step_counters(self) -> tuple[Tensor, ...]:
        """Return the sums over the tokens of the step so far: loss and tokens. The buffers
        themselves, not copies.
        """
        return self.loss_sum, self.num_tokens

    def reset_counts(self) -> None:
        """Set the counters of the step to zero."""
        for sums in self.get_step_counters():
            sums.zero_()

    def reset_buffers(self) -> None:
        """Set all buffers, for instance after `to_empty`."""
        self.reset_counts()


def expand_visible_keys(mask: AttentionMask, scores_BTS: Tensor) -> Tensor:
    """Return the keys that a mask shows, as a table.

    Args:
        mask: A mask without a bias.
        scores_BTS: Scores of the queries and keys.

    Returns:
        bool (B, T, S).
    """
    if mask.visible_B1TS is not None:
        return mask.visible_B1TS[:, 0].expand_as(scores_BTS)
    shown_TS = torch.ones_like(scores_BTS[0], dtype=torch.bool)
    # Without cached keys T = S; otherwise a single query sees all of them.
    return (shown_TS.tril() if mask.causal else shown_TS).expand_as(scores_BTS)


@torch.no_grad()
def compute_attention_shares(
    q_BTHL: Tensor, k_BSHL: Tensor, shown_BTS: Tensor, scale: float
) -> Tensor:
    """Compute the attention weights that the indexer learns from: the mean over heads, which sums
    to 1 over keys (equation 3).

    Args:
        q_BTHL: Queries of attention.
        k_BSHL: Keys of attention.
        shown_BTS: The keys that attention sees, at least one for each query.
        scale: Factor of the scores.

    Returns:
        float32 (B, T, S), without a gradient.
    """
    total_BTS = torch.zeros(shown_BTS.shape, dtype=torch.float32, device=q_BTHL.device)
    # Head by head: scores of all of them would take H times the memory.
    for q_BTL, k_BSL in zip(q_BTHL.unbind(2), k_BSHL.unbind(2), strict=True):
        scores_BTS = (q_BTL @ k_BSL.transpose(1, 2)).float() * scale
        total_BTS += scores_BTS.masked_fill_(~shown_BTS, -torch.inf).softmax(-1)
    return total_BTS / q_BTHL.shape[2]


class _DivergenceFunction(torch.autograd.Function):
    """Σ over real queries of KL(target ‖ softmax of scores over the shown keys). Saves its gradient
    and nothing else: softmax − target.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_BTS: Tensor, target_BTS: Tensor, shown_BTS: Tensor, real_BT: Tensor
    ) -> Tensor:
        logs_BTS = scores_BTS.masked_fill(~shown_BTS, -torch.inf).log_softmax(-1)
        ctx.save_for_backward((logs_BTS.exp() - target_BTS) * real_BT.unsqueeze(-1))
        # A hidden key has the share 0 in both, and the logarithm −inf.
        gaps_BTS = torch.xlogy(target_BTS, target_BTS) - target_BTS * logs_BTS.masked_fill_(
            ~shown_BTS, 0.0
        )
        return (gaps_BTS.sum(-1) * real_BT).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (difference_BTS,) = ctx.saved_tensors
        return gradients[0] * difference_BTS, None, None, None
