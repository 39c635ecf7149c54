"""Between DeepSpeed's gradient norm and its optimizer step: the place where a step can still be refused.

DeepSpeed asks its loss scaler there, and drops the step when gradients have overflowed. The gate stands in the place of
that question: it remembers the norm that was just taken, and answers "overflowed" for a step that is not accepted, so
that DeepSpeed clears gradients and buffers in its own way. The scale itself is the engine's, as under torch.
"""

from typing import Any

import torch

from llmsys.engine.engine import Accept, accept_all

NORMS = {"scaled_global_norm": "ZeRO-1 and ZeRO-2", "_get_norm_groups": "ZeRO-3"}


class GuardedOptimizer:
    """Wraps the optimizer that `deepspeed.initialize` made for ZeRO."""

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
        """Let DeepSpeed step unless `accept` refuses; (gradient norm before clipping, whether it was applied)."""
        self._loss, self._accept = loss, accept
        self._norm = float("inf")  # stays so where DeepSpeed finds an overflow and takes no norm
        engine.step()
        return self._norm, self._applied

    def _record_norm(self, *arguments: Any, **named: Any) -> Any:
        found = self._measure(*arguments, **named)
        parts = found if isinstance(found, list | tuple) else [found]
        squares = torch.stack([torch.as_tensor(part, dtype=torch.float64).cpu() for part in parts]).square()
        # An overflow inside a group is written as a norm of -1.
        overflowed = any(float(part) < 0 for part in parts)
        self._norm = float("inf") if overflowed else float(squares.sum().sqrt()) / float(self._zero.loss_scale)
        return found

    def _update_overflow(self, has_overflow: bool = False) -> None:
        self._applied = self._accept(self._loss, self._norm) and not has_overflow
        self._zero.overflow = not self._applied
