"""A metric on held-out targets, to copy and change. Run this file to test it: python my_metrics.py

evaluation:
  metrics:
    - kind: python
      path: my_metrics.py:TopK
      options: {k: 3}
"""

import torch
from pydantic import Field
from torch import Tensor

from llmsys.train.python_metric import PythonMetric, check_python_metric


class TopK(PythonMetric):
    """Share of targets that are among the most likely classes."""

    k: int = Field(5, ge=1, description="Number of classes.")

    def compute(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Return a number of each target; the mean over all held-out targets is the metric."""
        return (logits_NV.topk(self.k).indices == targets_N[:, None]).any(1).float()


if __name__ == "__main__":
    check_python_metric(TopK())
    assert TopK(k=2).compute(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([2])).item() == 1
    print("the metric gives each target its own number")
