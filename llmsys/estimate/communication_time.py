"""Seconds of collectives between ranks, by volume, group and links.

A group is said by its size and by the distance of its neighbours in rank numbers: that tells how
many of its members share a machine. Ring algorithms: Thakur 2005; the bus bandwidths are those of
nccl-tests' PERFORMANCE.md.

Seconds of communication in one step, by axis, and how much of it nothing hides.

Reads the layout and the compute it can hide behind; gives exposed seconds. Volumes follow the
engine: FSDP gathers weights for every micro-batch forward and backward (Zhao 2023); ZeRO-1 and DDP
move gradients once a step (Rajbhandari 2019, section 7); the tensor axis with sequence parallelism
gathers and scatters around each branch (Korthikanti 2022, section 4.2.2); the context axis
exchanges heads for positions (Jacobs 2023).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf, log2

from llmsys.config.engine import EngineConfig
from llmsys.config.expert_sharding import count_rank_visits, must_send_once_per_rank
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import FP32_BYTES
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.model_tensors import list_model_tensors


@dataclass(frozen=True)
class RankGroup:
    """Ranks that talk: how many, and how far apart two neighbours are numbered."""

    size: int
    stride: int = 1

    def count_ranks_per_node(self, device: DeviceProfile) -> int:
        """Members on one machine."""
        return max(1, min(self.size, device.node_devices // self.stride))

    @property
    def extent(self) -> int:
        """Ranks from the first member to the last."""
        return self.size * self.stride

    def count_nodes(self, device: DeviceProfile) -> int:
        """Machines that it spans."""
        return -(-self.size // self.count_ranks_per_node(device))


def estimate_all_gather_seconds(
    group: RankGroup, whole_bytes: float, device: DeviceProfile, messages: float = 1.0
) -> float:
    """All-gather of `whole_bytes` together, or reduce-scatter of as many, on a ring.

    Every rank sends (n − 1)/n of the whole. Between machines, the adapters of all members on one
    work together. Each of `messages` goes around the ring, so many small ones are slow on long
    rings.
    """
    if group.size == 1 or whole_bytes == 0:
        return 0.0
    local, nodes = group.count_ranks_per_node(device), group.count_nodes(device)
    inside = device.get_interconnect("node").bandwidth if local > 1 else inf
    bandwidth = (
        inside if nodes == 1 else min(inside, device.get_network(group.extent).bandwidth * local)
    )
    volume = whole_bytes * (group.size - 1) / group.size
    latency = messages * _estimate_ring_latency(group, device)
    return volume / (bandwidth * device.efficiency.links) + latency


# Bandwidth of NCCL's double binary trees over that of its rings (NCCL 2.18, src/graph/tuning.cc).
TREE_BANDWIDTH = 0.92


def estimate_all_reduce_seconds(
    group: RankGroup, whole_bytes: float, device: DeviceProfile, messages: float = 1.0
) -> float:
    """All-reduce of `whole_bytes` together in `messages`: a reduce-scatter and an all-gather on a
    ring, or a reduction up a tree of machines and down again, whichever is faster, as NCCL chooses.

    Args:
        group: the ranks.
        whole_bytes: bytes of all sums together.
        device: profile of the accelerator.
        messages: buckets that are summed one after the other.

    Returns:
        Seconds.
    """
    ring = 2 * estimate_all_gather_seconds(group, whole_bytes, device, messages)
    if (nodes := group.count_nodes(device)) <= 2:
        return ring  # where a tree is a ring
    local = group.count_ranks_per_node(device)
    inside = device.get_interconnect("node").latency_seconds if local > 1 else 0.0
    outside = device.get_network(group.extent).latency_seconds
    # Ranks of a machine are a chain (NCCL's tree between machines).
    depth = (local - 1) * inside + log2(nodes) * outside
    moved = 2 * estimate_all_gather_seconds(group, whole_bytes, device, 0.0)
    return min(ring, moved / TREE_BANDWIDTH + 2 * messages * depth)


# Of an all-reduce in which each rank reads what all others have, within a machine: 8 to 15 µs with
# eight H100s (TensorRT-LLM's and vLLM's custom all-reduce of a few hundred kilobytes).
ONE_SHOT_SECONDS = 1e-5


def estimate_small_all_reduce_seconds(
    group: RankGroup, whole_bytes: float, device: DeviceProfile
) -> float:
    """Estimate an all-reduce of few bytes, such as those of one generated token.

    Args:
        group: the ranks.
        whole_bytes: bytes of the sum.
        device: profile of the accelerator.

    Returns:
        Seconds of a ring, or within a machine those of one step in which every rank reads all
        others, if less.
    """
    ring = estimate_all_reduce_seconds(group, whole_bytes, device)
    if group.size == 1 or group.count_nodes(device) > 1:
        return ring
    bandwidth = device.get_interconnect("node").bandwidth * device.efficiency.links
    return min(ring, ONE_SHOT_SECONDS + (group.size - 1) * whole_bytes / bandwidth)


def estimate_all_to_all_seconds(
    group: RankGroup, sent_bytes: float, device: DeviceProfile
) -> float:
    """All-to-all in which every rank sends `sent_bytes`, its own part included.

    What stays on the machine and what leaves it travel at once; the slower of both counts.
    """
    if group.size == 1 or sent_bytes == 0:
        return 0.0
    local = group.count_ranks_per_node(device)
    inside = (
        sent_bytes * (local - 1) / group.size / device.get_interconnect("node").bandwidth
        if local > 1
        else 0.0
    )
    if group.count_nodes(device) == 1:
        return inside / device.efficiency.links + device.get_interconnect("node").latency_seconds
    outside = (
        sent_bytes * (group.size - local) / group.size / device.get_network(group.extent).bandwidth
    )
    return (
        max(inside, outside) / device.efficiency.links
        + device.get_network(group.extent).latency_seconds
    )


def estimate_send_seconds(sent_bytes: float, device: DeviceProfile, *, distance: int) -> float:
    """One rank to another one that is numbered `distance` further."""
    link = (
        device.get_network(distance + 1)
        if distance >= device.node_devices
        else device.get_interconnect("node")
    )
    return sent_bytes / (link.bandwidth * device.efficiency.links) + link.latency_seconds


def _estimate_ring_latency(group: RankGroup, device: DeviceProfile) -> float:
    """Return the seconds in which one value passes every member: the ring goes through all ranks
    of a machine before it leaves it.
    """
    local, nodes = group.count_ranks_per_node(device), group.count_nodes(device)
    inside = device.get_interconnect("node").latency_seconds if local > 1 else 0.0
    outside = device.get_network(group.extent).latency_seconds if nodes > 1 else 0.0
    return nodes * (local - 1) * inside + (nodes - 1) * outside


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch that this rank's blocks compute, forward and backward, and how
    often forward runs.
    """

    forward: float
    backward: float
    recomputed: float  # share of the forward that backward runs again


def estimate_tensor_parallel_seconds(
    bench: KernelContext, passes: PassSeconds, pipeline: int
) -> float:
    """Exposed seconds of the tensor axis in one micro-batch: two gathers and two scatters forward,
    as many backward.

    Backward also gathers each product's input again, for its weight gradient.
    """
    layout, model = bench.layout, bench.model
    if layout.tensor == 1:
        return 0.0
    values = bench.shape.num_tokens / layout.context * model.hidden_size
    group, size = RankGroup(layout.tensor), float(bench.shape.value_bytes)
    scatter = estimate_all_gather_seconds(group, values * size, bench.device)
    gather = estimate_all_gather_seconds(group, values * _count_gathered_bytes(bench), bench.device)
    # Two of each forward; backward two of each, and 2 gathers of inputs for the weight gradients.
    # A repeated forward ends before the scatter behind the last product where that is not needed.
    last = passes.recomputed if bench.software.repeats == "needed" else 0
    gathers = 2 * (1 + passes.recomputed) + 4
    scatters = gathers - 2 - last
    seconds = scatters * scatter + gathers * gather
    return seconds * model.num_hidden_layers / pipeline * (1 - bench.software.tensor_overlap)


def _count_gathered_bytes(bench: KernelContext) -> float:
    """Bytes of one gathered number: of an activation, or of a weight in a block."""
    is_narrow = bench.software.gathers == "matmul" and bench.matmul_dtype != "compute"
    return 1.0 if is_narrow else float(bench.shape.value_bytes)


def estimate_context_parallel_seconds(
    bench: KernelContext, passes: PassSeconds, pipeline: int, attention: float = 0.0
) -> float:
    """Exposed seconds of the context axis in one micro-batch.

    Without a ring queries, keys and values go out and the weighted sum comes back; the same
    backward. Of linear attention all projections go out in one message, and on a ring the changes
    of states are gathered. Messages of a ring travel next to `attention`, the seconds of its
    products forward and backward.
    """
    layout, model = bench.layout, bench.model
    if layout.context == 1:
        return 0.0
    tokens = bench.shape.num_tokens / (layout.context * layout.tensor)
    ranks = layout.context // layout.ring_size
    # Queries and outputs of all heads, keys and values of their groups.
    channels = 2 * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    if getattr(model.attention, "output_gate", False):
        channels += model.head_dim * model.num_attention_heads
    layers = model.num_attention_layers / pipeline
    kinds = [(layers, channels)]
    if model.linear_attention is not None:
        exchanged = sum(model.linear_attention.count_exchanged_channels(ranks))
        kinds.append((len(model.linear_layers) / pipeline, exchanged))
    group = RankGroup(ranks, layout.tensor)
    one = sum(
        count
        * estimate_all_to_all_seconds(
            group, tokens * channels * bench.shape.value_bytes, bench.device
        )
        for count, channels in kinds
    )
    # One round forward; two backward, for keys and values again and for their gradients.
    ring = (3 + passes.recomputed) * _estimate_ring_seconds(bench) * layers
    # Forward, and the backward pass computes them again.
    one_state = _estimate_state_seconds(bench) * len(model.linear_layers) / pipeline
    states = (3 + passes.recomputed) * one_state
    return (2 + passes.recomputed) * one + states + max(0.0, ring - attention)


def _estimate_state_seconds(bench: KernelContext) -> float:
    """Seconds in which the members of a ring gather how they change the states of a layer, and the
    last inputs of its convolution.
    """
    layout, linear = bench.layout, bench.model.linear_attention
    members = layout.ring_size
    if members == 1 or linear is None:
        return 0.0
    ranks = layout.context // members
    group, rows = RankGroup(members, ranks * layout.tensor), members * bench.shape.sequences
    tail = linear.count_tail_values(bench.shape.length // members, ranks) * bench.shape.value_bytes
    maps = linear.count_map_values(ranks) * FP32_BYTES
    return sum(estimate_all_gather_seconds(group, rows * one, bench.device) for one in (tail, maps))


def _estimate_ring_seconds(bench: KernelContext) -> float:
    """Seconds in which the keys and values of every other member of a ring arrive, in one layer."""
    layout, ring = bench.layout, bench.layout.ring_size
    if ring == 1:
        return 0.0
    scores, member = (
        bench.model.attention.build_score_shape(bench.model, 1, is_causal=True),
        layout.tensor,
    )
    member *= layout.context // ring
    heads = max(1.0, scores.key_value_heads / member)
    channels = heads * (scores.key_channels + scores.value_channels)
    sent = bench.shape.num_tokens / ring * channels * bench.shape.value_bytes
    # The farthest neighbours on the ring.
    distance = member if RankGroup(ring, member).count_nodes(bench.device) == 1 else ring * member
    return (ring - 1) * estimate_send_seconds(sent, bench.device, distance=distance)


def estimate_expert_parallel_seconds(
    bench: KernelContext, passes: PassSeconds, pipeline: int
) -> float:
    """Exposed seconds of the expert axis: every visit's vector goes out and comes back, and its
    gradient too.
    """
    layout, model = bench.layout, bench.model
    if layout.expert == 1 or model.moe is None:
        return 0.0
    tokens = bench.expert_load * bench.shape.num_tokens / (layout.context * layout.tensor)
    visits = model.moe.visits_per_token
    channels = model.moe.get_expert_channels(model.hidden_size)
    row = float(channels * bench.shape.value_bytes)
    if bench.software.expert_rows == "rank" and must_send_once_per_rank(model.moe, layout.expert):
        # The experts and weights of the token travel with it: int64 and 16 bits or more, one way of
        # two.
        visits, row = (
            count_rank_visits(model.moe, layout.expert),
            row + visits * (8 + bench.shape.value_bytes) / 2,
        )
    group = RankGroup(layout.expert)
    if bench.software.expert_rows == "node" and (nodes := group.count_nodes(bench.device)) > 1:
        # A vector travels once to each machine that it visits (DeepSeek-V3, section 3.2.2; DeepEP),
        # and from there on.
        one = _estimate_two_level_seconds(
            group, tokens * row, visits, count_rank_visits(model.moe, nodes), bench.device
        )
    else:
        one = estimate_all_to_all_seconds(group, tokens * visits * row, bench.device)
    # out and back, in the forward and the backward; in a repeated forward back only where all of
    # it is repeated
    repeated = 1 if bench.software.repeats == "needed" else 2
    times = (4 + repeated * passes.recomputed) * model.num_moe_layers / pipeline
    return times * one * (1 - bench.software.expert_overlap)


def _estimate_two_level_seconds(
    group: RankGroup, row_bytes: float, visits: float, node_visits: float, device: DeviceProfile
) -> float:
    """Seconds of an all-to-all that sends rows once to each machine; inside of one, to every
    expert.

    Both kinds of links work at once.
    """
    network, local, nodes = (
        device.get_network(group.extent),
        group.count_ranks_per_node(device),
        group.count_nodes(device),
    )
    outside = row_bytes * node_visits * (nodes - 1) / nodes / network.bandwidth
    inside = (
        row_bytes * visits * (local - 1) / local / device.get_interconnect("node").bandwidth
        if local > 1
        else 0.0
    )
    return max(inside, outside) / device.efficiency.links + network.latency_seconds


def estimate_data_parallel_seconds(
    bench: KernelContext,
    engine: EngineConfig,
    passes: PassSeconds,
    micro_batches: int,
    pipeline: int,
) -> float:
    """Exposed seconds, of a whole step, of weights and gradients between the ranks that share or
    repeat parameters.
    """
    layout, device = bench.layout, bench.device
    shard = RankGroup(layout.shard * layout.context, layout.tensor)
    replicate = RankGroup(layout.replicate, layout.ranks_per_replica)
    dense, experts = _count_rank_parameters(bench, pipeline)
    # Experts live on shard · context · tensor / expert ranks each.
    sparse = RankGroup(max(1, layout.ranks_per_replica // layout.expert), layout.expert)
    size = _count_gathered_bytes(bench)
    repeated = _count_repeated_parameters(bench) if engine.shards_weights else 0.0
    # A block's weights are one message; buckets of gradients are about as large.
    blocks = bench.model.num_hidden_layers / pipeline
    gather = estimate_all_gather_seconds(
        shard, (dense + repeated) * size, device, blocks
    ) + estimate_all_gather_seconds(sparse, experts * size, device, blocks)
    sent = bench.software.gradient_bytes or engine.reduced_bytes
    scatter = estimate_all_gather_seconds(
        shard, dense * sent, device, blocks
    ) + estimate_all_gather_seconds(sparse, experts * sent, device, blocks)
    local = (dense / shard.size + experts / sparse.size) * (bench.software.gradient_bytes or 4)
    copies = estimate_all_reduce_seconds(replicate, local, device, blocks)
    hide = bench.software.data_overlap if engine.overlaps_messages else 0.0
    if engine.shards_weights:
        forward = _compute_exposed_seconds(gather, hide, passes.forward)
        # Weights that stay gathered are there for the backward, or for all micro-batches.
        forwards = 1 if engine.keeps_weights_in_step else micro_batches
        again = 0.0 if engine.keeps_weights_in_micro_batch else gather
        if engine.reduces_each_micro_batch:
            backward = _compute_exposed_seconds(
                again + scatter + copies / micro_batches, hide, passes.backward
            )
            return forwards * forward + micro_batches * backward
        last = _compute_exposed_seconds(again + scatter + copies, hide, passes.backward)
        return (
            forwards * forward
            + (micro_batches - 1) * _compute_exposed_seconds(again, hide, passes.backward)
            + last
        )
    if bench.software.owned == "tensors":
        all_data = RankGroup(shard.size * replicate.size, layout.tensor)
        scatter = estimate_all_reduce_seconds(all_data, dense * sent, device, blocks)
        copies = 0.0
        owners = min(shard.size, _count_tensors(bench.model) / pipeline)
        gather = estimate_all_gather_seconds(shard, dense * size, device, owners)
    # Whole weights: gradients travel behind the backward of the last micro-batch, or of each, and a
    # step's new weights behind the next forward. An all-reduce is the same two.
    times = micro_batches if engine.reduces_each_micro_batch else 1
    gradients = times * scatter + copies
    return _compute_exposed_seconds(
        gradients, hide, times * passes.backward
    ) + _compute_exposed_seconds(gather, hide, passes.forward)


def _compute_exposed_seconds(seconds: float, hide: float, window: float) -> float:
    """Return the seconds that are not hidden: some traffic never is, and no more than the
    compute next to it.
    """
    return seconds - min(hide * seconds, window)


def estimate_pipeline_parallel_seconds(
    bench: KernelContext, pipeline: int, interleave: int
) -> float:
    """Sends between stages in one micro-batch, forward and backward, of which each rank does
    `interleave`.
    """
    if pipeline == 1:
        return 0.0
    layout = bench.layout
    sent = (
        bench.shape.num_tokens
        * bench.model.hidden_size
        * bench.shape.value_bytes
        / (layout.context * layout.tensor)
    )
    return (
        2
        * interleave
        * estimate_send_seconds(
            sent, bench.device, distance=max(layout.ranks_per_stage, bench.device.node_devices)
        )
    )


def _count_rank_parameters(bench: KernelContext, pipeline: int) -> tuple[float, float]:
    """Dense and expert parameters of one stage that a tensor rank, and an expert rank, has to
    itself.
    """
    dense, experts = _count_parameters_by_kind(bench.model)
    return dense / (bench.layout.tensor * pipeline), experts / (bench.layout.expert * pipeline)


@lru_cache(maxsize=64)  # a plan asks for those of one model thousands of times
def _count_parameters_by_kind(model: ModelConfig) -> tuple[int, int]:
    """Return the parameters outside of experts, and those of experts."""
    rows = list_model_tensors(model)
    experts = sum(row.num_elements for row in rows if row.is_routed)
    return sum(row.num_elements for row in rows) - experts, experts


def _count_tensors(model: ModelConfig) -> int:
    """Tensors of all blocks and of what is outside of them."""
    return sum(row.num_copies for row in list_model_tensors(model))


def _count_repeated_parameters(bench: KernelContext) -> float:
    """Parameters of a block that repeats, in the steps after its first: FSDP gathers it for
    each.
    """
    rows = list_model_tensors(bench.model)
    return (
        sum(row.num_elements * (row.steps - 1) for row in rows if row.layers) / bench.layout.tensor
    )
