"""What of a rank's memory depends on the program that trains, and not on its config.

The defaults are our trainer on a GPU. Other values let published rows of other systems be judged by the same sums.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemoryProfile:
    """One training program on one kind of device.

    Args:
        device: whose kernels run. On a CPU norms and attention keep more, and nothing is reserved by an allocator.
        pipeline: stages over which blocks are dealt, first in first out (1F1B; Narayanan 2021, arXiv:2104.04473).
        chunks: parts of the model that a stage holds (interleaved 1F1B).
        in_flight: micro-batches whose activations the first stage holds; 0 takes as many as there are stages.
        loss: chunked: logits never exist whole (our head_loss); fused: logits, and their gradient in
            float32 (a compiled loss); whole: eager cross entropy over float32 copies.
        head: what a tensor rank has of the logits: its positions with a whole head, or its columns of all positions
            with a part of it (loss parallel).
        masks: table: attention gets a table of positions where the batch needs one; none: it knows what is visible.
        attention: kernel: probabilities are never kept; explicit: scores, weights and dropout masks are.
        selective: what `train.recompute=selective` keeps. products: outputs of all products and of attention;
            alternate: of every second product and of attention (torchtitan); attention: everything but the scores
            (Megatron; Korthikanti 2022, arXiv:2205.05198, 5).
        stream: under tensor parallelism, whether positions between layers are divided over its ranks (sequence
            parallelism) or whole on each.
        gathered: under tensor parallelism with sequence parallelism, whether what column-parallel products read is
            kept gathered, or gathered again in the backward (Korthikanti 2022, 4.2.2).
        weights: sharded: whole only while a block uses them; whole: from the first use to the end of the backward.
        gradients: sharded after each backward; whole: float32, summed over micro-batches before they are sharded.
        activations: where they wait for the backward; of host, two blocks' are on their way at a time.
        evaluation: logits: held-out sequences pass forward between steps, their logits whole (our measure.py);
            none: the peak is that of training alone.
        measured: reserved: what the allocator holds (max_memory_reserved); allocated: what tensors hold.
    """

    device: Literal["cuda", "cpu"] = "cuda"
    pipeline: int = 1
    pipeline_chunks: int = 1
    in_flight: int = 0
    loss: Literal["chunked", "fused", "whole"] = "chunked"
    head: Literal["positions", "columns"] = "positions"
    masks: Literal["table", "none"] = "table"
    attention: Literal["kernel", "explicit"] = "kernel"
    selective: Literal["products", "alternate", "attention"] = "products"
    matmul_dtype: Literal["compute", "fp8"] = "compute"
    residual_dtype: Literal["divided", "whole"] = "divided"
    gathered: Literal["kept", "again"] = "kept"
    weights: Literal["sharded", "whole"] = "sharded"
    gradients: Literal["sharded", "whole"] = "sharded"
    activations: Literal["device", "host"] = "device"
    evaluation: Literal["logits", "none"] = "logits"
    measured: Literal["reserved", "allocated"] = "reserved"


OURS = MemoryProfile()
