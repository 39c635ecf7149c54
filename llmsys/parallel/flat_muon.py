"""Muon where a rank holds a flat shard of many parameters: masters and moments of DeepSpeed's ZeRO
1 to 3.

The momentum is updated in the shard. Matrices are then put together, some at a time, each is
orthogonalized by one rank of its group, and every rank takes the elements of its shard: two
all-reduces in the dtype of the products. An element is zero on all ranks but one, so these sums
round nothing. All other parameters use AdamW in the shard.

Invariants:
- Every rank of a group lists the same matrices in the same order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.config.optimizer import AdamWConfig, MuonConfig
from llmsys.optim.elementwise import STATE_KEYS, AdamWRule, apply_weight_decay, update_parameter
from llmsys.optim.muon import ADAMW_RMS, orthogonalize_matrices

# Elements of the matrices that are put together at a time; a larger matrix is alone.
CHUNK_ELEMENTS = 1 << 25


class ShardPiece(NamedTuple):
    """The elements of one matrix, or stack of matrices, that a rank's shard holds; none where
    the slices are empty.
    """

    shape: torch.Size
    in_matrix: slice
    in_shard: slice


class FlatMatrices(NamedTuple):
    """The parameters of one shard.

    Attributes:
        group: Ranks that share them.
        device: Where they are put together.
        pieces: This rank's elements of each.
    """

    group: dist.ProcessGroup
    device: torch.device
    pieces: Sequence[ShardPiece]

    def iter_chunks(self) -> Iterator[list[ShardPiece]]:
        """Yield the pieces in order, in lists whose matrices have at most `CHUNK_ELEMENTS`
        together.
        """
        chunk: list[ShardPiece] = []
        for piece in self.pieces:
            if chunk and sum(one.shape.numel() for one in [*chunk, piece]) > CHUNK_ELEMENTS:
                yield chunk
                chunk = []
            chunk.append(piece)
        if chunk:
            yield chunk


class FlatMuon(torch.optim.Optimizer):
    """Muon and AdamW over flat shards. A group has `algorithm`, "muon" or "adamw".

    Args:
        groups: Parameter groups, as for every torch optimizer.
        config: The `optimizer:` section.
        dtype: Dtype of the Newton-Schulz products.

    Attributes:
        matrices: The parameters of each shard; set once the shards exist.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], config: MuonConfig, dtype: torch.dtype
    ) -> None:
        super().__init__(
            [dict(group) for group in groups], {"lr": config.learning_rate, "weight_decay": 0.0}
        )
        self.matrices: dict[Tensor, FlatMatrices] = {}
        self._config = config
        self._dtype = dtype
        self._rule = AdamWRule(AdamWConfig(betas=config.betas, eps=config.eps))
        self._is_cautious = config.cautious_weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients. Collective."""
        for group in self.param_groups:
            for shard in group["params"]:
                state = self.state[shard]
                gradient = shard.grad
                state["step"] += 1
                if group["algorithm"] == "muon":
                    self._step_matrices(
                        shard, gradient, state["exp_avg"], group["lr"], group["weight_decay"]
                    )
                    continue
                moments = [state[STATE_KEYS[name]] for name in self._rule.moments]
                options = {
                    "step": int(state["step"]),
                    "rate": group["lr"],
                    "weight_decay": group["weight_decay"],
                    "is_cautious": self._is_cautious,
                }
                update_parameter(self._rule, shard, gradient, moments, **options)

    def _step_matrices(
        self, shard: Tensor, gradient: Tensor, average: Tensor, rate: float, decay: float
    ) -> None:
        momentum = self._config.momentum
        found = self.matrices[shard]
        average.lerp_(gradient, 1 - momentum)
        for chunk in found.iter_chunks():
            sizes = [piece.shape.numel() for piece in chunk]
            given = torch.zeros(sum(sizes), dtype=self._dtype, device=found.device)
            for piece, matrix in zip(chunk, given.split(sizes), strict=True):
                # Nesterov's momentum: the average one gradient ahead.
                ahead = gradient[piece.in_shard].lerp(average[piece.in_shard], momentum)
                matrix[piece.in_matrix] = ahead.to(self._dtype)
            updates = self._orthogonalize(chunk, given, found.group).split(sizes)
            for piece, update in zip(chunk, updates, strict=True):
                # An orthogonal matrix has the root mean square 1 / sqrt(max(M, N)).
                scale = ADAMW_RMS * math.sqrt(max(piece.shape[-2:]))
                own = shard[piece.in_shard]
                change = update[piece.in_matrix].to(shard)
                apply_weight_decay(own, change, rate * decay, is_cautious=self._is_cautious)
                own.add_(change, alpha=-rate * scale)

    def _orthogonalize(
        self, chunk: Sequence[ShardPiece], given: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """Return the orthogonalized matrices, one after another; each rank computes some of
        them. Collective.
        """
        dist.all_reduce(given, group=group)
        found = torch.zeros_like(given)
        sizes = [piece.shape.numel() for piece in chunk]
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        places = zip(chunk, given.split(sizes), found.split(sizes), strict=True)
        for number, (piece, source, target) in enumerate(places):
            if number % ranks == rank:
                updates = orthogonalize_matrices(
                    source.view(piece.shape),
                    self._config.newton_schulz_steps,
                    self._config.orthogonalization,
                )
                target.copy_(updates.flatten())
        dist.all_reduce(found, group=group)
        return found
