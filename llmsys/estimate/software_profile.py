"""Training programs as far as memory and time depend on them, besides the config.

The defaults are our trainer on a GPU. Other values let published rows of other systems be judged by
the same sums.

How a training program uses a device, as far as time depends on it: what is fused, hidden, launched.

Every field is a physical quantity; none is fitted to a single row. Named instances are the profiles
of `programs/`.

The dtype that `train.precision: auto` takes on a device that is described, not at hand; on one at
hand llmsys/train/precision.py asks torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.section import Section
from llmsys.config.train import Precision

if TYPE_CHECKING:
    from llmsys.estimate.device_profile import DeviceProfile


@dataclass(frozen=True)
class MemoryProfile:
    """One training program on one kind of device.

    Args:
        device: whose kernels run. On a CPU norms and attention keep more, and nothing is reserved
            by an allocator.
        pipeline: stages over which blocks are dealt, first in first out (1F1B; Narayanan 2021,
            arXiv:2104.04473).
        chunks: parts of the model that a stage holds (interleaved 1F1B).
        in_flight: micro-batches whose activations the first stage holds; 0 takes as many as there
            are stages.
        loss: kernel: full logits never exist, and a block's gradient takes the place of its logits
            (llmsys/train/cross_entropy.py); chunked: the same with a float32 copy of a block;
            fused: logits, and their gradient in float32 (a compiled loss); whole: eager cross
            entropy over float32 copies.
        head: what a tensor rank has of the logits: its positions with a whole head, or its columns
            of all positions with a part of it (loss parallel).
        capability: CUDA compute capability, by which the kernels of attention are chosen.
        masks: kernel: documents and windows decide the kernel, as in the model; none: they cost
            nothing.
        attention: kernel: probabilities are never kept; explicit: scores, weights and dropout masks
            are.
        selective: what `train.activation_checkpoint=selective` keeps. products: outputs of all
            products and of attention; alternate: of every second product and of attention
            (torchtitan); attention: everything but the scores (Megatron; Korthikanti 2022,
            arXiv:2205.05198, 5).
        stream: under tensor parallelism, whether positions between layers are divided over its
            ranks (sequence parallelism) or whole on each.
        gathered: under tensor parallelism with sequence parallelism, whether what column-parallel
            products read is kept gathered, or gathered again in the backward (Korthikanti 2022,
            4.2.2).
        weights: sharded: whole only while a block uses them; whole: from the first use to the end
            of the backward.
        gradients: sharded after each backward; whole: float32, summed over micro-batches before
            they are sharded.
        activations: where they wait for the backward; of host, two blocks' are on their way at a
            time.
        evaluation: logits: held-out sequences pass forward between steps, their logits whole (our
            measure.py); none: the peak is that of training alone.
        schedule: 1f1b, interleaved with chunks; bidirectional: a rank has a stage of each half, and
            micro-batches enter at both ends, so weights are there twice (DualPipe; DeepSeek-V3,
            arXiv:2412.19437, 3.2.1).
        stages: equal: as many blocks on the first and last rank as on others; short_ends: embedding
            and head count as a block each (Llama 3, arXiv:2407.21783, 3.3.2).
        boundaries: kept: a stage keeps what it sent for the backward; freed: the next one has it
            (Korthikanti 2022, B).
        recomputed: what the backward computes again although no checkpoint asks for it. fused: what
            is between the operations of a kernel; elementwise: outputs of norms and gated
            activations too; latent: also up-projections of latent attention.
        linear_inputs: what linear layers and gated activations keep of their 16-bit inputs. fp8: a
            byte, and a float32 scale for 128 values; of the output of attention, which attention
            reads too, 12 bits (DeepSeek-V3, 3.3.3).
        expert_weights: where the router's weights multiply. outputs: those of the experts, which
            are kept; inputs: what their down-projection reads.
        moments: type of the moments where ZeRO shards them.
        measured: reserved: what the allocator holds (max_memory_reserved); allocated: what tensors
            hold.
        expert_load: tokens of the fullest rank of experts over the mean of the ranks.
    """

    device: Literal["cuda", "cpu"] = "cuda"
    pipeline: int = 1
    pipeline_chunks: int = 1
    in_flight: int = 0
    loss: Literal["kernel", "chunked", "fused", "whole"] = "kernel"
    head: Literal["positions", "columns"] = "positions"
    capability: tuple[int, int] | None = (9, 0)
    masks: Literal["kernel", "none"] = "kernel"
    attention: Literal["kernel", "explicit"] = "kernel"
    selective: Literal["products", "alternate", "attention"] = "products"
    matmul_dtype: Literal["compute", "fp8"] = "compute"
    residual_dtype: Literal["divided", "whole"] = "divided"
    gathered: Literal["kept", "again"] = "kept"
    weights: Literal["sharded", "whole"] = "sharded"
    gradients: Literal["sharded", "whole"] = "sharded"
    activations: Literal["device", "host"] = "device"
    evaluation: Literal["logits", "none"] = "logits"
    schedule: Literal["1f1b", "bidirectional"] = "1f1b"
    stages: Literal["equal", "short_ends"] = "equal"
    boundaries: Literal["kept", "freed"] = "kept"
    recomputed: Literal["nothing", "fused", "elementwise", "latent"] = "nothing"
    linear_inputs: Literal["compute", "fp8"] = "compute"
    expert_weights: Literal["outputs", "inputs"] = "outputs"
    moments: Literal["fp32", "bf16"] = "fp32"
    measured: Literal["reserved", "allocated"] = "reserved"
    expert_load: float = 1.0

    @property
    def saves_plainly(self) -> bool:
        """True where blocks keep what autograd saves: neither computed again nor in another
        type.
        """
        return (self.recomputed, self.linear_inputs, self.expert_weights) == (
            "nothing",
            "compute",
            "outputs",
        )


OURS = MemoryProfile()


class SoftwareProfile(Section):
    """Kernels and overlaps of a training program. The defaults are fused kernels with overlapped
    collectives.
    """

    traffic: float = Field(
        1.0, ge=1, description="Bytes moved by elementwise kernels / bytes of fused kernels."
    )
    loss_bytes: float = Field(
        12, ge=0, description="Bytes moved per logit in the loss, forward and backward."
    )
    attention: Literal["fused", "native", "unfused", "chosen"] = Field(
        "fused",
        description="fused: torch's kernels. native: kernels for this device. unfused: every "
        "score is written to memory. chosen: by llmsys' table of kernels, where the device "
        "has a compute capability.",
    )
    attention_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Rate of its fused attention kernels over those that a device's profile "
        "measured.",
    )
    sink_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Rate of attention kernels with learned sinks over that without, where native.",
    )
    expert_rows: Literal["node", "rank", "visit"] = Field(
        "node",
        description="Times that a token is sent to its experts. node: once to each machine that "
        "has one of them. rank: as llmsys does, once to each rank where that saves enough. "
        "visit: once to each expert, by an all-to-all, after which each rank sorts what it "
        "got.",
    )
    permutation: Literal["kernels", "dispatch"] = Field(
        "kernels",
        description="Where visits are sorted by expert, and summed again. kernels: in passes of "
        "their own. dispatch: by the kernels that send them, as HybridEP's do, so that their "
        "memory traffic is hidden by the links; without an expert axis as `kernels`.",
    )
    context: Literal["heads", "ring"] = Field(
        "heads", description="Context parallelism; on a ring the last rank has the most work."
    )
    stages: Literal["balanced", "even"] = Field(
        "balanced",
        description="Cut of a pipeline. even: equally many blocks on each rank where they divide, "
        "and the head on top of the last; otherwise embedding and head count as a block each. "
        "balanced: by cost.",
    )
    bubble: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Bubble of the pipeline / that of 1F1B with as many stages; zero-bubble ones: "
        "1/3.",
    )
    launch: Literal["eager", "compiled"] = Field(
        "compiled", description="eager: the host launches every kernel."
    )
    counts_wrapper: bool = Field(
        False,
        description="Copies in memory and hooks on the host that data parallelism adds are "
        "counted one by one; false: the fit of the program includes them.",
    )
    expert_launches: int = Field(
        0,
        ge=0,
        description="Kernels that the host launches for each local expert of a layer forward; "
        "they show where they outlast the matmuls of the experts. 0: grouped ones.",
    )
    reads_counts: bool = Field(
        True,
        description="The host reads the tokens of each expert from the device in every layer; "
        "false: sizes are fixed, so all compute hides the launches for experts.",
    )
    compiles: bool = Field(
        False, description="torch.compile decides what blocks save for the backward."
    )
    activations: Literal["device", "host"] = Field(
        "device", description="host: block inputs are offloaded to host memory."
    )
    recomputed_matmuls: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of a block's matmuls that selective activation checkpointing "
        "recomputes.",
    )
    repeats: Literal["block", "needed"] = Field(
        "block",
        description="What full activation checkpointing computes again. block: the whole forward "
        "of a block. needed: until the last tensor that the backward reads is there, so neither "
        "down-projections nor what brings outputs of experts back (early_stop of "
        "torch.utils.checkpoint, where the router's weights multiply before the "
        "down-projection).",
    )
    data_overlap: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Share of the communication of weights and gradients that overlaps with "
        "compute.",
    )
    tensor_overlap: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of tensor-parallel communication that overlaps with compute.",
    )
    gradient_bytes: Literal[0, 2, 4] = Field(
        0,
        description="Bytes of an element of the messages in which gradients are summed. 0: those "
        "of the engine.",
    )
    owned: Literal["slices", "tensors"] = Field(
        "slices",
        description="What a rank updates under ZeRO-1. slices: an equal part of all parameters, "
        "which is scattered to it and gathered again. tensors: whole tensors, so gradients are "
        "all-reduced, and every rank broadcasts its own new weights in a message.",
    )
    gathers: Literal["compute", "matmul"] = Field(
        "compute",
        description="Number type of what tensor parallelism and sharding gather. matmul: that of "
        "the inputs of matmuls, 8 bits where these are.",
    )
    expert_overlap: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of expert-parallel communication that overlaps with compute.",
    )


def select_precision(device: "DeviceProfile | None") -> tuple[Precision, str]:
    """Return the number type of `train.precision: auto` on a device.

    Args:
        device: its profile; None: bf16, since that is what accelerators train in.

    Returns:
        bf16 where the profile multiplies it faster than fp32, else fp32; and the reason.
    """
    if device is None:
        return "bf16", "no device is given, and accelerators support it natively"
    bf16, fp32 = (device.peak_flops.get(number) for number in ("bf16", "fp32"))
    if bf16 is None:
        return "fp32", f"the profile of {device.name} has no bf16 matmuls"
    if fp32 is not None and bf16 <= fp32:
        return "fp32", f"the profile of {device.name} is no faster in bf16"
    return "bf16", f"the profile of {device.name} supports it natively"


def resolve_for_profile(config: RunConfig, device: "DeviceProfile | None" = None) -> RunConfig:
    """Resolve `train.precision=auto` by a device profile.

    Args:
        config: resolved config of a run.
        device: profile; None: the one that flops.device names.

    Returns:
        The config with bf16 or fp32 instead of `auto`.

    Raises:
        ConfigError: other settings need another precision, or flops.device names no profile.
    """
    if config.train.precision != "auto":
        return config
    device = device if device is not None else find_named_profile(config)
    return config.resolve_precision(*select_precision(device))


def resolve_compile_for_profile(
    config: RunConfig, device: "DeviceProfile | None", layout: ParallelLayout | None = None
) -> RunConfig:
    """Resolve `train.compile=auto` as training does on a device.

    Args:
        config: config of a run.
        device: profile; None: the one that flops.device names.
        layout: layout that the estimate is for; None: that of the config.

    Returns:
        The config with block or none instead of `auto`, which stays where no device is known: eager
        blocks, an upper bound of memory.
    """
    device = device if device is not None else find_named_profile(config)
    if device is None or config.train.compile != "auto":
        return config
    with_layout = config if layout is None else config.model_copy(update={"layout": layout})
    return config.model_copy(
        update={"train": with_layout.resolve_compile(has_triton(device)).train}
    )


def has_triton(device: "DeviceProfile") -> bool:
    """Return whether torch.compile generates Triton kernels for a device, as torch checks it.

    Args:
        device: profile.

    Returns:
        True for CUDA devices of compute capability 7.0 or later.
    """
    return device.compute_capability is not None and device.compute_capability >= (7, 0)


def find_named_profile(config: RunConfig) -> "DeviceProfile | None":
    """Return the profile that flops.device names; None where it names none.

    Args:
        config: config of a run.

    Returns:
        The profile.
    """
    if config.flops.device is None:
        return None
    from llmsys.estimate.device_profile import load_device_profile  # most estimates name no device

    return load_device_profile(config.flops.device)


class PrecisionChoice(Section):
    """The number type that the estimate counts with."""

    number: str = Field(description="bf16, fp16 or fp32.")
    reason: str = Field(description="Why it is that one.")


def describe_precision(config: RunConfig, device: "DeviceProfile | None" = None) -> PrecisionChoice:
    """Return the type an estimate of this config counts with, and why it is that one.

    Args:
        config: resolved config of a run.
        device: profile of the device; None: the one that `flops.device` names.

    Returns:
        The number type and the reason.
    """
    if config.train.precision != "auto":
        return PrecisionChoice(
            number=config.train.resolved_precision, reason="train.precision names it"
        )
    device = device if device is not None else find_named_profile(config)
    number, reason = select_precision(device)
    return PrecisionChoice(number=number, reason=f"train.precision=auto: {reason}")
