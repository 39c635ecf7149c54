"""Between DeepSpeed's gradient norm and its optimizer step: the place where a step can still be refused.

DeepSpeed asks its loss scaler there, and drops the step when gradients have overflowed. The gate stands in front of
that question: it remembers the norm that was just taken, and answers "overflowed" for a step that is not accepted, so
that DeepSpeed clears gradients and buffers in its own way. The loss scale does not hear of it.

The scale itself moves after the step only: where it grows, DeepSpeed would divide the gradients by the grown one.
"""

from typing import Any

import torch

from llmsys.engine.engine import Accept, always

NORMS = {"scaled_global_norm": "ZeRO-1 and ZeRO-2", "_get_norm_groups": "ZeRO-3"}


class StepGate:
    """Wraps the optimizer that `deepspeed.initialize` made for ZeRO. `ask` is set before each step."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._loss = 0.0
        self._accept: Accept = always
        self.applied, self._overflowed = True, False
        self.gradient_norm = float("nan")
        name = next(name for name in NORMS if hasattr(zero, name))
        self._measure, self._update_scale = getattr(zero, name), zero._update_scale
        setattr(zero, name, self._measured)
        zero._update_scale = self._decided

    def step(self, engine: Any, loss: float, accept: Accept) -> tuple[float, bool]:
        """Let DeepSpeed step unless `accept` refuses; (gradient norm before clipping, whether it was applied)."""
        self._loss, self._accept, self.applied = loss, accept, True
        self.gradient_norm = float("inf")  # stays so where DeepSpeed finds an overflow and takes no norm
        engine.step()
        self._update_scale(self._overflowed)
        return self.gradient_norm, self.applied

    def _measured(self, *arguments: Any, **named: Any) -> Any:
        found = self._measure(*arguments, **named)
        parts = found if isinstance(found, list | tuple) else [found]
        squares = torch.stack([torch.as_tensor(part, dtype=torch.float64).cpu() for part in parts]).square()
        # An overflow inside a group is written as a norm of -1.
        overflowed = any(float(part) < 0 for part in parts)
        self.gradient_norm = float("inf") if overflowed else float(squares.sum().sqrt()) / float(self._zero.loss_scale)
        return found

    def _decided(self, has_overflow: bool = False) -> None:
        self._overflowed = has_overflow
        self.applied = not has_overflow and self._accept(self._loss, self.gradient_norm)
        self._zero.overflow = not self.applied
