"""What the head and its loss take, from the last hidden states to the gradient of the head."""

from llmsys.config.run import RunConfig
from llmsys.estimate.instants import Item
from llmsys.estimate.kept import Extent
from llmsys.estimate.memory import FP32
from llmsys.estimate.tensors import has_logits

# llmsys/train/head_loss.py and loss.py: bytes of one block of logits, and how much of it is in float32 at a time.
BLOCK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 29}
FLOAT_ELEMENTS_ON_CPU, FLOAT_ROWS_ON_GPU = 1 << 19, 8192
LOGITS = {"logits", "gradient of logits", "logits in float32", "one block of logits", "a piece of it in float32"}


def loss_items(config: RunConfig, extent: Extent, head_elements: int) -> list[Item]:
    """Bytes beside weights and kept activations at the fullest moment of the loss."""
    model, system = config.model, extent.system
    hidden = extent.stream(model.hidden_size)
    if not has_logits(model):
        return [Item("last hidden states", 2 * hidden)]
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    if system.loss == "chunked":
        return _chunked(config, extent, head_elements, 1 + depth)
    read = extent.gathered(model.hidden_size) if system.head == "columns" else hidden
    logits = extent.stream(model.vocab_size)  # by positions or by columns, a tensor rank has the same share
    items = [Item("last hidden states", (1 + depth) * (hidden + read)), Item("logits", (1 + depth) * logits)]
    if system.loss == "fused":
        return [*items, Item("gradient of logits", extent.stream(model.vocab_size, FP32))]
    # Log-softmax is kept, and its backward makes gradients of it and of the logits. Over columns (loss parallel) it
    # takes one more. The 16-bit logits are free by then, but nothing as large fits into their place.
    copies = 4 if system.head == "columns" and extent.tensor > 1 else 3
    return [*items, Item("logits in float32", copies * extent.stream(model.vocab_size, FP32))]


def loss_leftovers(config: RunConfig, extent: Extent, head_elements: int) -> list[Item]:
    """What of the loss is alive during the backward of the blocks: gradients of hidden states and of the head."""
    if not has_logits(config.model):
        return []
    size = extent.value
    stream = Item("gradient of the stream", 2 * extent.stream(config.model.hidden_size))
    return [stream, Item("gradient of the head", size * head_elements)]


def _chunked(config: RunConfig, extent: Extent, head_elements: int, passes: int) -> list[Item]:
    """head_loss: a block of logits at a time, and gradients of hidden states and weight made in the forward."""
    model, device = config.model, extent.system.device
    tokens, vocabulary, size = extent.stream(1, 1), model.vocab_size, extent.value
    rows = min(tokens, max(16, BLOCK_BYTES[device] // (vocabulary * size)))
    in_float = min(rows, max(8, FLOAT_ELEMENTS_ON_CPU // vocabulary) if device == "cpu" else FLOAT_ROWS_ON_GPU)
    blocks = -(-tokens // rows)
    summed = FP32 if blocks > 1 else size
    return [
        # What enters the final norm, what it gives, and of each pass the targets' rows and their gradients.
        Item("last hidden states and their gradient", (2 * passes + 2) * extent.stream(model.hidden_size)),
        Item("one block of logits", rows * vocabulary * size),
        Item("a piece of it in float32", in_float * vocabulary * FP32),
        Item("gradient of the head", head_elements * (passes * summed + (size if blocks > 1 else 0))),
    ]


def logits_bytes(items: list[Item]) -> int:
    """Of `loss_items`, what is as large as rows of logits."""
    return sum(item.bytes for item in items if item.name in LOGITS)
