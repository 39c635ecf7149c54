"""Ring attention: positions stay on their ranks, and keys and values come round (Liu 2023,
arXiv:2310.01889).

In step s a rank attends to the keys of the rank s places before it, while those of the next step
travel. They come directly from their owner, so that a step which a window hides costs no message
either, and gradients of keys and values go straight home, where they are added in float32. Partial
results are merged by their log-sum-exp (ring_blocks.py).

A sink adds its exponential to the denominator of the merged softmax: out · exp(lse − L), with L the
log-sum-exp of lse and sink. As in llmsys/model/varlen_attention.py the backward takes the folded
output and L.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.model.attention_mask import DistributedMask
from llmsys.parallel.ring_blocks import BlockRule, Side, add_block, add_block_gradients

# B rows, L local queries, S = L keys of a rank, H query heads, G key-value heads, K width of a key,
# V width of a value, P rows of positions, N ranks of the ring


@dataclass(frozen=True)
class RingMask(DistributedMask):
    """The mask of the layers of one type in a forward pass, whose keys come round a ring of ranks.

    Attributes:
        group: Name of the process group of the ring.
        positions_PNL: Positions of the tokens of each rank, ascending.
        lower_PL: The first position that a query of this rank sees.
        upper_PL: The last one.
        distances: Steps that are made, 0 first; a window leaves out those in which no rank sees a
            key.
        is_fused: Flash attention applies.
        is_dealt: Positions are in zigzag order; False: ranks have neighbouring ones.
        slopes_H: ALiBi's slopes of this rank's heads.
    """

    group: str
    positions_PNL: Tensor
    lower_PL: Tensor
    upper_PL: Tensor
    distances: tuple[int, ...]
    is_fused: bool
    is_dealt: bool
    slopes_H: Tensor | None = None

    def compute_attention(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Return attention to the keys of all ranks, (B, L, H, V), in the dtype of the values.
        Collective.
        """
        q, k, v = (x.to(v_BLGV.dtype).contiguous() for x in (q_BLHK, k_BLGK, v_BLGV))
        places = (
            self.slopes_H,
            self.positions_PNL,
            self.lower_PL,
            self.upper_PL,
            list(self.distances),
        )
        out_BLHV: Tensor = run_ring(
            q, k, v, sinks_H, *places, self.is_fused, self.is_dealt, scale, softcap, self.group
        )[0]
        return out_BLHV


# Keys and values, or their gradients.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Ring:
    """The neighbours of this rank."""

    group: dist.ProcessGroup

    def start_exchange(self, pair: Pair, distance: int) -> tuple[Pair, list[dist.Work]]:
        """Start to send to the rank `distance` places on, and to receive from the one as far
        back.
        """
        size = self.group.size()
        rank = self.group.rank()
        arriving = (torch.empty_like(pair[0]), torch.empty_like(pair[1]))
        messages = []
        for leaving, target in zip(pair, arriving, strict=True):
            to = (rank + distance) % size
            source = (rank - distance) % size
            messages += [
                dist.P2POp(dist.isend, leaving, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, target, group=self.group, group_peer=source),
            ]
        return arriving, dist.batch_isend_irecv(messages)

    def get_source(self, distance: int) -> int:
        """Return the rank whose keys are here in a step."""
        return (self.group.rank() - distance) % self.group.size()

    def get_side(self, distance: int) -> Side:
        """Return where that rank's chunks lie."""
        return "own" if distance == 0 else "before" if distance <= self.group.rank() else "after"


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def compute_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    slopes_H: Tensor | None,
    positions_PNL: Tensor,
    lower_PL: Tensor,
    upper_PL: Tensor,
    distances: list[int],
    is_fused: bool,
    is_dealt: bool,
    scale: float,
    softcap: float | None,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return the output, (B, L, H, V), and the log-sum-exp of all scores and the sink, float32 (B,
    H, L). Collective.

    Args:
        q: Queries, (B, L, H, K).
        k: Keys of this rank, (B, L, G, K).
        v: Values of this rank, (B, L, G, V).
        sinks_H: An extra score per head that takes weight and has no value.
        slopes_H: See `RingMask`.
        positions_PNL: See `RingMask`.
        lower_PL: See `RingMask`.
        upper_PL: See `RingMask`.
        distances: See `RingMask`.
        is_fused: See `RingMask`.
        is_dealt: See `RingMask`.
        scale: Factor on the scores.
        softcap: Cap of the scores.
        group: Name of the process group.

    Returns:
        Output and log-sum-exp.
    """
    # Operators take strings, not process groups.
    ring = _Ring(dist.distributed_c10d._resolve_process_group(dist.GroupName(group)))
    kinds = (is_fused, is_dealt, scale, softcap)
    rule = _build_rule(ring, positions_PNL, lower_PL, upper_PL, slopes_H, *kinds)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=torch.float32)
    # The identity of `merge_block`: no keys so far.
    lse_BHL = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
    here = (k, v)
    works = list[dist.Work]()
    for distance, following in zip(distances, [*distances[1:], None], strict=True):
        _wait(works)
        arriving, works = (
            (here, []) if following is None else ring.start_exchange((k, v), following)
        )
        add_block(out, lse_BHL, q, *here, _select_source(rule, ring, distance, positions_PNL))
        here = arriving
    if sinks_H is not None:
        whole_BHL = torch.logaddexp(lse_BHL, sinks_H.float()[:, None])
        out.mul_((lse_BHL - whole_BHL).exp_().transpose(1, 2)[..., None])
        lse_BHL = whole_BHL
    return out.to(v.dtype), lse_BHL


# Custom ops, so that selective checkpointing saves the outputs of a ring and no step of it.
run_ring = torch.library.custom_op("llmsys::ring_attention", compute_ring, mutates_args=())


@run_ring.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    lse_BHL = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[-1])), lse_BHL


def compute_ring_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_BHL: Tensor,
    slopes_H: Tensor | None,
    positions_PNL: Tensor,
    lower_PL: Tensor,
    upper_PL: Tensor,
    distances: list[int],
    is_fused: bool,
    is_dealt: bool,
    scale: float,
    softcap: float | None,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; those of keys are the sums of all ranks.
    Collective.

    Args:
        dout: Gradient of the output.
        q: See `compute_ring`; so are k, v and all from `slopes_H` on.
        k: Keys.
        v: Values.
        out: The output.
        lse_BHL: Its log-sum-exp.
        slopes_H: Slopes.
        positions_PNL: Positions.
        lower_PL: First positions.
        upper_PL: Last positions.
        distances: Steps.
        is_fused: Whether flash attention applies.
        is_dealt: Whether positions are in zigzag order.
        scale: Factor on the scores.
        softcap: Cap of the scores.
        group: Name of the process group.

    Returns:
        Gradients, in the dtypes of q, k and v.
    """
    ring = _Ring(dist.distributed_c10d._resolve_process_group(dist.GroupName(group)))
    kinds = (is_fused, is_dealt, scale, softcap)
    rule = _build_rule(ring, positions_PNL, lower_PL, upper_PL, slopes_H, *kinds)
    dq = q.new_zeros(q.shape, dtype=torch.float32)
    totals = tuple[Tensor, ...]()
    returning = tuple[Tensor, ...]()
    homing = list[dist.Work]()
    here = (k, v)
    works = list[dist.Work]()
    for distance, following in zip(distances, [*distances[1:], None], strict=True):
        _wait(works)
        arriving, works = (
            (here, []) if following is None else ring.start_exchange((k, v), following)
        )
        aimed = _select_source(rule, ring, distance, positions_PNL)
        parts = add_block_gradients(dq, dout, q, *here, out, lse_BHL, aimed)
        if distance == 0:
            # Gradients of this rank's own keys need not travel.
            totals = parts
        else:
            # Those of the step before have travelled during this step's products.
            _add_returned(totals, returning, homing)
            # Each rank's share is rounded once, to the dtype of the keys; the sum is in float32.
            returning, homing = ring.start_exchange(
                (parts[0].to(k.dtype), parts[1].to(v.dtype)), -distance
            )
        here = arriving
    _add_returned(totals, returning, homing)
    return dq.to(q.dtype), totals[0].to(k.dtype).contiguous(), totals[1].to(v.dtype).contiguous()


run_ring_backward = torch.library.custom_op(
    "llmsys::ring_attention_backward", compute_ring_gradients, mutates_args=()
)


@run_ring_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Contiguous, as above: compiled blocks rely on it.
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _add_returned(
    totals: tuple[Tensor, ...], returning: tuple[Tensor, ...], homing: list[dist.Work]
) -> None:
    _wait(homing)
    # Nothing returns from the step of the rank's own keys.
    for total, part in zip(totals, returning, strict=False):
        total.add_(part)


def _build_rule(
    ring: _Ring,
    positions_PNL: Tensor,
    lower_PL: Tensor,
    upper_PL: Tensor,
    slopes_H: Tensor | None,
    is_fused: bool,
    is_dealt: bool,
    scale: float,
    softcap: float | None,
) -> BlockRule:
    own_PL = positions_PNL[:, ring.group.rank()]
    places = (own_PL, own_PL, lower_PL, upper_PL, slopes_H)
    return BlockRule(scale, softcap, is_fused, is_dealt, "own", *places)


def _select_source(rule: BlockRule, ring: _Ring, distance: int, positions_PNL: Tensor) -> BlockRule:
    return replace(
        rule, side=ring.get_side(distance), keys_PS=positions_PNL[:, ring.get_source(distance)]
    )


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks_H, slopes_H, positions_PNL, lower_PL, upper_PL, *ctx.constants = inputs
    ctx.set_materialize_grads(False)  # nothing needs a gradient of the log-sum-exp
    ctx.save_for_backward(q, k, v, sinks_H, slopes_H, positions_PNL, lower_PL, upper_PL, *output)


def _run_backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks_H, slopes_H, positions_PNL, lower_PL, upper_PL, out, lse_BHL = ctx.saved_tensors
    places = (slopes_H, positions_PNL, lower_PL, upper_PL)
    dout = dout.contiguous()
    gradients = run_ring_backward(dout, q, k, v, out, lse_BHL, *places, *ctx.constants)
    dsinks_H = None
    if sinks_H is not None and ctx.needs_input_grad[3]:
        # A sink's value is zero, so its score gets minus its weight times gradient · output.
        dots_BHL = (dout.float() * out.float()).sum(-1).transpose(1, 2)
        dsinks_H = (
            -((sinks_H.float()[:, None] - lse_BHL).exp() * dots_BHL).sum((0, 2)).to(sinks_H.dtype)
        )
    # The inputs without gradients, from the slopes to the group.
    return *gradients, dsinks_H, *[None] * 10


run_ring.register_autograd(_run_backward, setup_context=_save_inputs)
OPERATION = torch.ops.llmsys.ring_attention.default
# The operations as functions of smaller ones, for a dry run, which counts those.
STEPS: dict[Any, Callable[..., Any]] = {
    OPERATION: compute_ring,
    torch.ops.llmsys.ring_attention_backward.default: compute_ring_gradients,
}
