"""The plain process: the eager model in fp32, row by row; own losses, clipping and optimizers.

It shares the model and the rows of the data with a run, and no code with its engines: neither
sharding, nor sums over micro-batches, nor clipping, nor optimizers, nor schedules, nor the control
of a run.

Reads the datasets; writes nothing.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, assert_never

import torch
from torch import Tensor

from llmsys.config.batch import BatchConfig
from llmsys.config.engine import TorchEngineConfig
from llmsys.config.matrix_optimizers import SoapConfig
from llmsys.config.moe import AuxiliaryLossConfig, BiasBalancingConfig, NoBalancingConfig
from llmsys.config.objective import NextSentenceConfig
from llmsys.config.optimizer import MuonConfig, ScheduleFreeConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.schedule import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    InverseSqrtScheduleConfig,
    LinearScheduleConfig,
    NoamScheduleConfig,
    PythonScheduleConfig,
    WsdScheduleConfig,
)
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.step_batches import BucketedStepBatches
from llmsys.doctor.pairs.plain_clip import PlainQueryClip
from llmsys.doctor.pairs.plain_losses import (
    DocumentLosses,
    RouterWatch,
    add_document_losses,
    sum_further_nats,
    sum_nats,
)
from llmsys.doctor.pairs.plain_optimizers import PlainStep, list_moment_names
from llmsys.model.initialization import initialize_parameters
from llmsys.model.lightning_indexer import LightningIndexer
from llmsys.model.output_head import get_next_sentence_head
from llmsys.model.parametrization import compute_rate_factor
from llmsys.model.recurrence import AdaptiveRecurrence
from llmsys.model.transformer import Transformer
from llmsys.train.build_objective import build_evaluator, build_step_batches

# Returns a context around operations of the model; it may change what they compute.
Errors = Callable[[], AbstractContextManager[Any]]
no_errors: Errors = contextlib.nullcontext

PARAMETER, AVERAGE, BUFFER = "parameter/", "average/", "buffer/"


@dataclass
class PlainState:
    """All state of a plain process.

    Attributes:
        tensors: by the names that checkpoints have.
        updates: steps that changed the weights.
        average_weight: sum of the weights of all steps in the average of a schedule-free optimizer.
        largest_rate: the largest learning rate so far.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0
    average_weight: float = 0.0
    largest_rate: float = 0.0


def build_plain_config(config: RunConfig) -> RunConfig:
    """Return the config for a plain process: rows one by one, neither layout nor engine."""
    changes: dict[str, Any] = {
        "layout": ParallelLayout(),
        "engine": TorchEngineConfig(data_parallel="fsdp"),
        "batch": config.batch.model_copy(update={"micro_sequences": 1, "assignment": "sequential"}),
        "train": config.train.model_copy(update={"reproducibility": "fast", "precision": "fp32"}),
    }
    return config.model_copy(update=changes)


class PlainProcess:
    """One process that trains plainly what the config of a run says."""

    def __init__(self, config: RunConfig) -> None:
        self.config = build_plain_config(config)
        self.model = Transformer(config.model)
        initialize_parameters(self.model, config.run.seed)
        if isinstance(config.objective, NextSentenceConfig):
            get_next_sentence_head(self.model).is_trained = True
        self.parameters = dict(self.model.named_parameters())
        self.buffers = {
            name: buffer
            for name, buffer in self.model.named_buffers()
            if name in self.model.state_dict()
        }
        self.watch = RouterWatch(self.model)
        limit = config.optimizer.max_attention_logit
        self.query_clip = None if limit is None else PlainQueryClip(self.model, limit)
        self.steps = build_step_batches(self.config, 1, 0)
        # Of the last step, where the run records them.
        self.documents: DocumentLosses = {}
        self.state = PlainState()
        for name, parameter in self.parameters.items():
            self.state.tensors[PARAMETER + name] = parameter.detach().double()
            for moment, shape in list_moment_names(config.optimizer, name, parameter.shape).items():
                self.state.tensors[f"{moment}/{name}"] = torch.zeros(shape, dtype=torch.float64)
        for name, buffer in self.buffers.items():
            self.state.tensors[BUFFER + name] = buffer.clone()
        self._reset_averages()

    def branch(self, config: RunConfig) -> None:
        """Continue with the settings of a branch."""
        self.config = build_plain_config(config)
        self.steps = build_step_batches(self.config, 1, 0)

    def copy_state(self) -> PlainState:
        """Return a copy of the state, for a save."""
        return copy.deepcopy(self.state)

    def load_state(self, state: PlainState) -> None:
        """Return to a saved state."""
        self.state = copy.deepcopy(state)
        self._load_weights(PARAMETER)

    def correct_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors that were found equal, so that rounding does not add up."""
        for name, tensor in tensors.items():
            if name in self.state.tensors:
                self.state.tensors[name] = tensor.to(self.state.tensors[name].dtype)
        self._load_weights(PARAMETER)

    def evaluate(self, errors: Errors = no_errors) -> float:
        """Return the held-out loss, of the average where there is one.

        Args:
            errors: returns the context of the model's operations.
        """
        self._load_weights(AVERAGE if self._has_average else PARAMETER)
        self.model.eval()

        @torch.no_grad()
        def compute_logits(batch: Batch) -> Tensor:
            with errors():
                logits: Tensor = self.model(**batch.to_model_inputs())
            return logits

        result = build_evaluator(self.config).evaluate(compute_logits, torch.device("cpu"))
        self._load_weights(PARAMETER)
        return float(result.to_dict()["loss"])

    def train(
        self,
        step: int,
        *,
        is_applied: bool,
        found: Mapping[str, Tensor] | None = None,
        errors: Errors = no_errors,
    ) -> tuple[float, float]:
        """Train step `step`, counted from 1, and return loss and gradient norm before clipping.

        Args:
            step: the step.
            is_applied: whether it changes the weights.
            found: moments of the run after the step. Weights then move by the gradient that these
                contain, while moments are those of the plain gradient: an optimizer that divides a
                gradient by its own size turns one that is zero but for rounding into a whole step.
            errors: returns the context of the forward and backward passes, and of the gradient
                that the moments of the run contain.
        """
        rows = list(self._iter_rows(step - 1))
        self.watch.balance_factor = interpolate_points(
            self.config.factors.balance, self._count_tokens(step)
        )
        with errors():
            loss, loads, targets = self._add_gradients(rows)
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
        }
        norm = math.sqrt(
            sum(float(gradient.double().square().sum()) for gradient in gradients.values())
        )
        if is_applied:
            limit = self.config.optimizer.max_grad_norm
            factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
            clipped = {name: gradient.double() * factor for name, gradient in gradients.items()}
            self._update_weights(step, clipped, found or {}, errors)
        if self.query_clip is not None:
            self.query_clip.clip(self.state.tensors, PARAMETER, is_applied=is_applied)
            self._load_weights(PARAMETER)
        if is_applied:
            self._update_balance(loads, self.watch.balance_factor)
            self._update_average(targets)
        self.model.zero_grad(set_to_none=True)
        return loss, norm

    def _iter_rows(self, step: int) -> Iterator[Batch]:
        """Yield each row of a step, counted from 0, as a batch without padding."""
        if isinstance(self.steps, BucketedStepBatches):
            for group in self.steps.grouping.get_step_buckets(step):
                for row in group.tolist():
                    yield self.steps.make(self.steps.pairs, [row])
            return
        yield from self.steps.get_micro_batches(step)

    def _count_tokens(self, step: int) -> int:
        return self.config.batch.count_tokens_before(step)

    def _add_gradients(self, rows: list[Batch]) -> tuple[float, dict[str, Tensor], int]:
        """Add the gradients of a step; return loss, load of each router, and targets."""
        self.model.train()
        targets = sum(int((row.targets_BT != IGNORED).sum()) for row in rows)
        tokens = sum(_count_tokens(row.tokens_BT, row.documents_BT, row.real_BT) for row in rows)
        source_tokens = sum(
            _count_tokens(row.source_BS, row.source_documents_BS, None) for row in rows
        )
        labels = sum(
            0 if (one := row.next_sentence_B) is None else int((one != IGNORED).sum())
            for row in rows
        )
        loads: dict[str, Tensor] = {}
        self.documents = {}
        total = 0.0
        for row in rows:
            self.watch.clear()
            logits = self.model(**row.to_model_inputs())
            nats = sum_nats(logits, row.targets_BT, self.config.loss)
            add_document_losses(self.documents, row, logits, self.config.loss)
            share = (nats + sum_further_nats(self.model, row, self.config.loss)) / max(1, targets)
            for name, found in self.watch.loads.items():
                seen = max(1, source_tokens if name.startswith("encoder.") else tokens)
                for load in found:
                    share = share + load.loss / seen
                    loads[name] = loads.get(name, torch.zeros(())) + load.tokens_E
            share = share + self._compute_own_losses(tokens, source_tokens)
            if row.next_sentence_B is not None:
                share = share + get_next_sentence_head(self.model).take_loss() / max(1, labels)
            share.backward()
            total += float(nats.detach())
        return total / max(1, targets), loads, targets

    def _compute_own_losses(self, tokens: int, source_tokens: int) -> Tensor:
        """Return the losses of positions that halt by themselves and of indexers, which the model
        counts.
        """
        total = torch.zeros(())
        for name, module in self.model.named_modules():
            if isinstance(module, AdaptiveRecurrence | LightningIndexer):
                seen = max(1, source_tokens if name.startswith("encoder.") else tokens)
                total = total + module.sum_auxiliary_losses() / seen
        return total

    def _update_weights(
        self,
        step: int,
        gradients: dict[str, Tensor],
        found: Mapping[str, Tensor],
        errors: Errors,
    ) -> None:
        config, tensors = self.config.optimizer, self.state.tensors
        self.state.updates += 1
        rate = config.learning_rate * compute_rate_multiplier(self.config, step)
        share = 0.0
        if isinstance(config, ScheduleFreeConfig):
            # Step t counts the square of the largest rate so far, times t to a power: the averaging
            # of Defazio 2024, algorithm 1, with a warm-up, as in the authors' package.
            self.state.largest_rate = max(self.state.largest_rate, rate)
            weight = self.state.updates**config.averaging_power * self.state.largest_rate**2
            self.state.average_weight += weight
            share = weight / self.state.average_weight if self.state.average_weight else 0.0
        decay_share = interpolate_points(self.config.factors.weight_decay, self._count_tokens(step))
        for name, gradient in gradients.items():
            moments = {
                moment: tensors[f"{moment}/{name}"]
                for moment in list_moment_names(config, name, self.parameters[name].shape)
            }
            own_rate, decay = self._get_rates(name, rate, decay_share)
            now = tensors[PARAMETER + name]
            theirs = {
                moment: found[key].double()
                for moment in moments
                if (key := f"{moment}/{name}") in found
            }
            one = PlainStep(config, self.state.updates, own_rate, decay, share, theirs)
            contained = one.find_contained_gradient(name, now, gradient, moments, theirs)
            # Stored moments are rounded, and so is the gradient that is read from them.
            with errors():
                contained = contained * 1.0
            of_contained = dict(moments)
            tensors[PARAMETER + name] = one.compute_weight(name, now, contained, of_contained)
            one.compute_weight(name, now, gradient, moments)
            if isinstance(config, SoapConfig):
                # It is sorted by eigenvalues, of which two that are nearly equal change places by
                # the rounding of a gradient. The other moments are those of the plain gradient.
                moments["second_moment"] = of_contained["second_moment"]
            tensors |= {f"{moment}/{name}": value for moment, value in moments.items()}
        self._load_weights(PARAMETER)

    def _get_rates(self, name: str, rate: float, decay_share: float) -> tuple[float, float]:
        """Return learning rate and weight decay of a parameter: matrices decay, vectors do not."""
        config = self.config.optimizer
        is_muon = (
            isinstance(config, MuonConfig)
            and config.select_update_rule(name, self.parameters[name].ndim) == "muon"
        )
        factor = compute_rate_factor(self.config.model, name, 0.5 if is_muon else 1.0)
        own = config.embedding_lr_multiplier if name in ("embed.weight", "head.weight") else 1.0
        decays = self.parameters[name].ndim >= 2 and not name.endswith("_bias")
        return rate * own * factor, (config.weight_decay * decay_share / factor if decays else 0.0)

    def _update_balance(self, loads: dict[str, Tensor], factor: float) -> None:
        """Move the bias of each expert by its load, and keep the shares for the next step."""
        for name, tokens_E in loads.items():
            config = self.watch.layers[name].config
            match config.balance:
                case BiasBalancingConfig(rate=rate):
                    bias = self.state.tensors[f"{BUFFER}{name}.balance_bias_E"]
                    moved = bias + rate * factor * torch.sign(tokens_E.mean() - tokens_E)
                    self.state.tensors[f"{BUFFER}{name}.balance_bias_E"] = moved
                case AuxiliaryLossConfig(scope="batch"):
                    share_E = tokens_E / tokens_E.sum().clamp(min=1)
                    self.state.tensors[f"{BUFFER}{name}.expert_share_E"] = share_E
                case AuxiliaryLossConfig() | NoBalancingConfig():
                    pass
                case unreachable:
                    assert_never(unreachable)
        self._load_weights(PARAMETER)

    @property
    def _has_average(self) -> bool:
        is_schedule_free = isinstance(self.config.optimizer, ScheduleFreeConfig)
        return is_schedule_free or self.config.train.ema_half_life_tokens > 0

    def _reset_averages(self) -> None:
        if self._has_average:
            for name in self.parameters:
                self.state.tensors[AVERAGE + name] = self.state.tensors[PARAMETER + name].clone()

    def _update_average(self, targets: int) -> None:
        """Move the average of the weights, by its half-life or as the optimizer says."""
        config, tensors = self.config, self.state.tensors
        for name in self.parameters if self._has_average else ():
            weight = tensors[PARAMETER + name]
            if isinstance(config.optimizer, ScheduleFreeConfig):
                beta = config.optimizer.betas[0]
                tensors[AVERAGE + name] = (
                    weight - (1 - beta) / beta * tensors[f"lookahead_moment/{name}"]
                )
            else:
                kept = 0.5 ** (targets / config.train.ema_half_life_tokens)
                tensors[AVERAGE + name] = kept * tensors[AVERAGE + name] + (1 - kept) * weight

    @torch.no_grad()
    def _load_weights(self, which: str) -> None:
        """Copy weights or averages, and the buffers, from the state into the model."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.state.tensors[which + name])
        for name, buffer in self.buffers.items():
            buffer.copy_(self.state.tensors[BUFFER + name])


def _count_tokens(tokens: Tensor | None, documents: Tensor | None, real: Tensor | None) -> int:
    if real is not None:
        return int(real.sum())
    if documents is not None:
        return int((documents >= 0).sum())
    return 0 if tokens is None else tokens.numel()


def compute_rate_multiplier(config: RunConfig, step: int) -> float:
    """Return the share of the peak rate at a step, counted from 1, by the schedule's formula."""
    schedule, batch = config.schedule, config.batch
    if isinstance(schedule, NoamScheduleConfig):
        shape = min(step**-0.5, step * schedule.warmup_steps**-1.5)
        return float(config.model.hidden_size**-0.5 * shape)
    tokens, total = _count_step_tokens(batch, step), config.train.tokens
    if tokens < schedule.warmup_tokens:
        return tokens / schedule.warmup_tokens
    match schedule:
        case ConstantScheduleConfig():
            return 1.0
        case InverseSqrtScheduleConfig():
            return math.sqrt(schedule.warmup_tokens / tokens)
        case WsdScheduleConfig():
            left = min(1.0, max(0.0, (total - tokens) / schedule.decay_tokens))
        case LinearScheduleConfig():
            left = max(0.0, (total - tokens) / (total - schedule.warmup_tokens))
        case CosineScheduleConfig():
            passed = min(1.0, (tokens - schedule.warmup_tokens) / (total - schedule.warmup_tokens))
            left = 0.5 * (1 + math.cos(math.pi * passed))
        case PythonScheduleConfig():
            raise TypeError("a class of the user's own has no plain form")
        case unreachable:
            assert_never(unreachable)
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * left


def _count_step_tokens(batch: BatchConfig, step: int) -> int:
    return sum(batch.get_step_tokens(number) for number in range(step))


def interpolate_points(points: tuple[tuple[int, float], ...], tokens: int) -> float:
    """Return the factor of piecewise linear points; of two at one place the later one counts."""
    if not points:
        return 1.0
    value = points[0][1]
    for (start, low), (end, high) in pairwise(points):
        if start <= tokens < end:
            value = low + (high - low) * (tokens - start) / (end - start)
        elif tokens >= end:
            value = high
    return value
