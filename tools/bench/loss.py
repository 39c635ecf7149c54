"""Measure the chunked cross entropy next to torch's `cross_entropy(logits.float())`: forward and
backward, one thread.

python tools/bench/loss.py [--tokens 4096] [--vocabulary 8192] [--runs 7]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from llmsys.train.cross_entropy import compute_sequence_losses


def compute_plain_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the loss as usually written."""
    return torch.nn.functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="sum"
    )


def measure_seconds(
    loss: Callable[[Tensor, Tensor], Tensor], logits_BTV: Tensor, targets_BT: Tensor
) -> float:
    """Return the seconds of one forward and backward."""
    logits_BTV.grad = None
    start = time.perf_counter()
    loss(logits_BTV, targets_BT).sum().backward()
    return time.perf_counter() - start


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of a micro-batch (default: %(default)s)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=8192, help="pieces (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=int, default=7, help="counted pairs of runs (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = (8, arguments.tokens // 8, arguments.vocabulary)
    logits_BTV = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    targets_BT = torch.randint(0, arguments.vocabulary, shape[:2])
    pairs = [
        (
            measure_seconds(compute_plain_loss, logits_BTV, targets_BT),
            measure_seconds(compute_sequence_losses, logits_BTV, targets_BT),
        )
        for _ in range(arguments.runs + 1)
    ][1:]
    ours = statistics.median(pair[1] for pair in pairs)
    theirs = statistics.median(pair[0] for pair in pairs)
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    print(
        f"plain {theirs * 1e3:.0f} ms, chunked {ours * 1e3:.0f} ms, ratio {ratio:.2f} (medians of "
        f"{arguments.runs})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
