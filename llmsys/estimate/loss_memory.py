"""Memory of the head and its loss, from the last hidden states to the gradient of the head."""

from llmsys.config.run import RunConfig
from llmsys.config.saved_tensor import ActivationShape
from llmsys.estimate.memory_timeline import MemoryItem
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import FP32

# llmsys/train/linear_cross_entropy.py and loss.py: bytes of one block of logits, and how much of it is in float32 at a
# time.
BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 29}
FLOAT_ELEMENTS_ON_CPU, FLOAT_ROWS_ON_GPU = 1 << 19, 8192
LOGITS = {"logits", "gradient of logits", "logits in float32", "one block of logits", "a piece of it in float32"}


def list_loss_items(
    config: RunConfig, shape: ActivationShape, system: MemoryProfile, head_elements: int
) -> list[MemoryItem]:
    """Bytes beside weights and kept activations at the fullest moment of the loss."""
    model = config.model
    hidden = shape.compute_residual_bytes(model.hidden_size)
    if not model.head.has_logits:
        return [MemoryItem("last hidden states", 2 * hidden)]
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    if system.loss == "chunked":
        return _list_chunked_loss_items(config, shape, head_elements, 1 + depth)
    read = shape.compute_gathered_bytes(model.hidden_size) if system.head == "columns" else hidden
    logits = shape.compute_residual_bytes(
        model.vocab_size
    )  # by positions or by columns, a tensor rank has the same share
    items = [
        MemoryItem("last hidden states", (1 + depth) * (hidden + read)),
        MemoryItem("logits", (1 + depth) * logits),
    ]
    if system.loss == "fused":
        return [*items, MemoryItem("gradient of logits", shape.compute_residual_bytes(model.vocab_size, FP32))]
    # Log-softmax is kept, and its backward makes gradients of it and of the logits. Over columns (loss parallel) it
    # takes one more. The 16-bit logits are free by then, but nothing as large fits into their place.
    copies = 4 if system.head == "columns" and shape.tensor > 1 else 3
    return [*items, MemoryItem("logits in float32", copies * shape.compute_residual_bytes(model.vocab_size, FP32))]


def list_loss_remainders(config: RunConfig, shape: ActivationShape, head_elements: int) -> list[MemoryItem]:
    """Return the loss tensors alive during the blocks' backward: gradients of hidden states and of the head."""
    if not config.model.head.has_logits:
        return []
    size = shape.value_bytes
    stream = MemoryItem("gradient of the stream", 2 * shape.compute_residual_bytes(config.model.hidden_size))
    return [stream, MemoryItem("gradient of the head", size * head_elements)]


def _list_chunked_loss_items(
    config: RunConfig, shape: ActivationShape, head_elements: int, passes: int
) -> list[MemoryItem]:
    """linear_cross_entropy: a block of logits at a time, and gradients of hidden states and weight made in the forward."""
    model, device = config.model, "cpu" if shape.is_on_cpu else "cuda"
    tokens, vocabulary, size = shape.compute_residual_bytes(1, 1), model.vocab_size, shape.value_bytes
    rows = min(tokens, max(16, BLOCK_BYTES[device] // (vocabulary * size)))
    in_float = min(rows, max(8, FLOAT_ELEMENTS_ON_CPU // vocabulary) if device == "cpu" else FLOAT_ROWS_ON_GPU)
    blocks = -(-tokens // rows)
    summed = FP32 if blocks > 1 else size
    return [
        # What enters the final norm, what it gives, and of each pass the targets' rows and their gradients.
        MemoryItem(
            "last hidden states and their gradient", (2 * passes + 2) * shape.compute_residual_bytes(model.hidden_size)
        ),
        MemoryItem("one block of logits", rows * vocabulary * size),
        MemoryItem("a piece of it in float32", in_float * vocabulary * FP32),
        MemoryItem("gradient of the head", head_elements * (passes * summed + (size if blocks > 1 else 0))),
    ]


def sum_logits_bytes(items: list[MemoryItem]) -> int:
    """Of `list_loss_items`, what is as large as rows of logits."""
    return sum(item.bytes for item in items if item.name in LOGITS)
