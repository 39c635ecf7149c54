"""What the head and its loss take, from the last hidden states to the gradient of the head."""

from llmsys.config.run import RunConfig
from llmsys.estimate.memory_timeline import MemoryItem
from llmsys.estimate.model_tensors import has_logits
from llmsys.estimate.saved_tensors import ActivationShape
from llmsys.estimate.state_memory import FP32

# llmsys/train/linear_cross_entropy.py and loss.py: bytes of one block of logits, and how much of it is in float32 at a
# time.
BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 29}
FLOAT_ELEMENTS_ON_CPU, FLOAT_ROWS_ON_GPU = 1 << 19, 8192
LOGITS = {"logits", "gradient of logits", "logits in float32", "one block of logits", "a piece of it in float32"}


def list_loss_items(config: RunConfig, extent: ActivationShape, head_elements: int) -> list[MemoryItem]:
    """Bytes beside weights and kept activations at the fullest moment of the loss."""
    model, system = config.model, extent.system
    hidden = extent.compute_residual_bytes(model.hidden_size)
    if not has_logits(model):
        return [MemoryItem("last hidden states", 2 * hidden)]
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    if system.loss == "chunked":
        return _list_chunked_loss_items(config, extent, head_elements, 1 + depth)
    read = extent.compute_gathered_bytes(model.hidden_size) if system.head == "columns" else hidden
    logits = extent.compute_residual_bytes(
        model.vocab_size
    )  # by positions or by columns, a tensor rank has the same share
    items = [
        MemoryItem("last hidden states", (1 + depth) * (hidden + read)),
        MemoryItem("logits", (1 + depth) * logits),
    ]
    if system.loss == "fused":
        return [*items, MemoryItem("gradient of logits", extent.compute_residual_bytes(model.vocab_size, FP32))]
    # Log-softmax is kept, and its backward makes gradients of it and of the logits. Over columns (loss parallel) it
    # takes one more. The 16-bit logits are free by then, but nothing as large fits into their place.
    copies = 4 if system.head == "columns" and extent.tensor > 1 else 3
    return [*items, MemoryItem("logits in float32", copies * extent.compute_residual_bytes(model.vocab_size, FP32))]


def list_loss_remainders(config: RunConfig, extent: ActivationShape, head_elements: int) -> list[MemoryItem]:
    """What of the loss is alive during the backward of the blocks: gradients of hidden states and of the head."""
    if not has_logits(config.model):
        return []
    size = extent.value
    stream = MemoryItem("gradient of the stream", 2 * extent.compute_residual_bytes(config.model.hidden_size))
    return [stream, MemoryItem("gradient of the head", size * head_elements)]


def _list_chunked_loss_items(
    config: RunConfig, extent: ActivationShape, head_elements: int, passes: int
) -> list[MemoryItem]:
    """head_loss: a block of logits at a time, and gradients of hidden states and weight made in the forward."""
    model, device = config.model, extent.system.device
    tokens, vocabulary, size = extent.compute_residual_bytes(1, 1), model.vocab_size, extent.value
    rows = min(tokens, max(16, BLOCK_BYTES[device] // (vocabulary * size)))
    in_float = min(rows, max(8, FLOAT_ELEMENTS_ON_CPU // vocabulary) if device == "cpu" else FLOAT_ROWS_ON_GPU)
    blocks = -(-tokens // rows)
    summed = FP32 if blocks > 1 else size
    return [
        # What enters the final norm, what it gives, and of each pass the targets' rows and their gradients.
        MemoryItem(
            "last hidden states and their gradient", (2 * passes + 2) * extent.compute_residual_bytes(model.hidden_size)
        ),
        MemoryItem("one block of logits", rows * vocabulary * size),
        MemoryItem("a piece of it in float32", in_float * vocabulary * FP32),
        MemoryItem("gradient of the head", head_elements * (passes * summed + (size if blocks > 1 else 0))),
    ]


def sum_logits_bytes(items: list[MemoryItem]) -> int:
    """Of `list_loss_items`, what is as large as rows of logits."""
    return sum(item.bytes for item in items if item.name in LOGITS)
