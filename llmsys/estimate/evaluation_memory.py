"""Memory of one evaluation forward besides state and weights in use: no backward, full logits.

A rank carries all positions of its sequences, whatever axes divide them in training
(llmsys/parallel/sequence_sharding.py).
"""

from dataclasses import replace

from llmsys.config.run import RunConfig
from llmsys.config.saved_tensor import ActivationShape
from llmsys.estimate.activation_memory import iter_block_groups
from llmsys.estimate.loss_memory import FLOAT_ELEMENTS_ON_CPU, FLOAT_ROWS_ON_GPU
from llmsys.estimate.memory_timeline import MemoryItem
from llmsys.estimate.state_memory import FP32

IN_EVALUATION = "in an evaluation"
SOFTCAP_COPIES = 3  # the logits, their quotient, and its tanh


def list_evaluation_items(config: RunConfig, training: ActivationShape) -> list[MemoryItem]:
    """Return bytes of `evaluation_sequences` held-out sequences; `training` is the size of a training micro-batch."""
    model, train = config.model, config.train
    shape = replace(
        training,
        sequences=config.evaluation_sequences,
        context=1,
        is_stream_sharded=False,
    )
    compiled = train.compile == "block"
    branches = [branch for kind in iter_block_groups(config, shape) for branch in kind.branches]
    work = max(sum(one.bytes for one in branch if not (compiled and one.producer == "fused")) for branch in branches)
    stream = shape.compute_residual_bytes(model.hidden_size)
    table = shape.sequences * shape.length**2 if shape.mask_table == "documents" else 0
    return [
        MemoryItem("temporaries of a block", work),
        MemoryItem("the stream", 2 * stream),
        MemoryItem("attention mask", table),
        *(_list_logits(config, shape) if model.head.has_logits else ()),
    ]


def _list_logits(config: RunConfig, shape: ActivationShape) -> list[MemoryItem]:
    """Return the logits of all positions, and the rows of them that the loss reads in float32."""
    model = config.model
    copies = SOFTCAP_COPIES if getattr(model.head, "softcap", None) is not None else 1
    rows = max(8, FLOAT_ELEMENTS_ON_CPU // model.vocab_size) if shape.is_on_cpu else FLOAT_ROWS_ON_GPU
    return [
        MemoryItem("logits", copies * shape.compute_residual_bytes(model.vocab_size)),
        MemoryItem("a piece of them in float32", min(rows, shape.num_tokens) * model.vocab_size * FP32),
    ]
