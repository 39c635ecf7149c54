"""The point inside DeepSpeed's step, after the gradient norm is known, where the step can be
skipped.
"""

from typing import Any

import torch

from llmsys.engine.engine import Accept, accept_all

NORMS = {"scaled_global_norm": "ZeRO-1 and ZeRO-2", "_get_norm_groups": "ZeRO-3"}


class GuardedOptimizer:
    """The optimizer that `deepspeed.initialize` made for ZeRO, with a check between gradient norm
    and step.

    DeepSpeed asks its loss scaler there, and skips the step when gradients overflowed. Here the
    answer is "overflowed" for a step that `accept` refuses, so that DeepSpeed clears gradients and
    buffers in its own way.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._loss = 0.0
        self._accept: Accept = accept_all
        self._applied = True
        self._norm = float("nan")
        name = next(name for name in NORMS if hasattr(zero, name))
        self._measure = getattr(zero, name)
        setattr(zero, name, self._record_norm)
        zero._update_scale = self._update_overflow

    def step(self, engine: Any, loss: float, accept: Accept) -> tuple[float, bool]:
        """Let DeepSpeed step unless `accept` refuses.

        Returns:
            The gradient norm before clipping, and whether the step was applied.
        """
        self._loss = loss
        self._accept = accept
        # unchanged where DeepSpeed finds an overflow and computes no norm
        self._norm = float("inf")
        engine.step()
        return self._norm, self._applied

    def _record_norm(self, *arguments: Any, **named: Any) -> Any:
        result = self._measure(*arguments, **named)
        norms = result if isinstance(result, list | tuple) else [result]
        squares = torch.stack(
            [torch.as_tensor(norm, dtype=torch.float64).cpu() for norm in norms]
        ).square()
        # DeepSpeed writes an overflow inside a group as a norm of -1.
        overflowed = any(float(norm) < 0 for norm in norms)
        self._norm = (
            float("inf")
            if overflowed
            else float(squares.sum().sqrt()) / float(self._zero.loss_scale)
        )
        return result

    def _update_overflow(self, has_overflow: bool = False) -> None:
        self._applied = self._accept(self._loss, self._norm) and not has_overflow
        self._zero.overflow = not self._applied
