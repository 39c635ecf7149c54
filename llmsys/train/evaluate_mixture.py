"""The held-back documents of a mixture: each source by itself, and all of them together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmsys.train.evaluate import HeldoutEvaluation
from llmsys.train.measure import Evaluator, Logits, TargetEvaluation, EvaluationResult


@dataclass(frozen=True)
class MixtureResult:
    """What is true of all sources together, and of each."""

    combined: HeldoutEvaluation | TargetEvaluation
    sources: Mapping[str, HeldoutEvaluation | TargetEvaluation]

    def to_dict(self) -> dict[str, Any]:
        """The numbers of all together, and under `sources` those of each by name."""
        return self.combined.to_dict() | {"sources": {name: one.to_dict() for name, one in self.sources.items()}}


@dataclass(frozen=True)
class MixtureEvaluator:
    """Evaluates every source; a source weighs as much as it has held back, not as its share in training."""

    evaluators: Mapping[str, Evaluator]

    def evaluate(self, logits: Logits, device: torch.device) -> EvaluationResult:
        """See Evaluator."""
        found: dict[str, Any] = {name: one.evaluate(logits, device) for name, one in self.evaluators.items()}
        return MixtureResult(combine_results(list(found.values())), found)


def combine_results(parts: Sequence[HeldoutEvaluation] | Sequence[TargetEvaluation]) -> HeldoutEvaluation | TargetEvaluation:
    """The same numbers over the targets, or bytes, of all parts."""
    if isinstance(parts[0], TargetEvaluation):
        mean = _build_weighted_mean(parts, "evaluated_targets")
        loss = mean("loss")
        targets = sum(part.evaluated_targets for part in parts if isinstance(part, TargetEvaluation))
        return TargetEvaluation(loss, math.exp(loss), mean("accuracy"), targets)
    by_token, by_byte = _build_weighted_mean(parts, "evaluated_tokens"), _build_weighted_mean(parts, "evaluated_bytes")
    loss = by_token("loss")
    return HeldoutEvaluation(
        loss=loss,
        bits_per_byte=by_byte("bits_per_byte"),
        perplexity=math.exp(loss),
        evaluated_tokens=sum(part.to_dict()["evaluated_tokens"] for part in parts),
        evaluated_bytes=sum(part.to_dict()["evaluated_bytes"] for part in parts),
        gzip_bits_per_byte=by_byte("gzip_bits_per_byte"),
        xz_bits_per_byte=by_byte("xz_bits_per_byte"),
    )


def _build_weighted_mean(parts: Sequence[EvaluationResult], weight: str) -> Callable[[str], float]:
    fields = [part.to_dict() for part in parts]
    total = sum(one[weight] for one in fields)
    return lambda name: float(sum(one[name] * one[weight] for one in fields) / max(total, 1))
