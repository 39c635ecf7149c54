"""Optimizers as their papers write them: one parameter at a time, in float64, plain operations.

They share no code with llmsys/optim. State is kept by the names that checkpoints have, so that it
can be compared.
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from llmsys.config.matrix_optimizers import AdafactorConfig, MuonConfig, SoapConfig
from llmsys.config.optimizer import (
    AdamConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    OptimizerConfig,
    PythonOptimizerConfig,
    ScheduleFreeConfig,
)

# Name of a moment in a checkpoint → float64 tensor.
Moments = dict[str, Tensor]

# A hundred roundings of float32: what is smaller in SOAP, relative to the largest, is rounding.
SOAP_ROUNDING = 1e-5

# Two products of matrices, each of sums that tiny models have at most a hundred terms in: sixteen
# roundings of float32, relative to the largest eigenvalue.
EIGENVALUE_ROUNDING = 16 * 2.0**-24

# Roundings of float32 in a second moment: of its decay, of the square, of their sum, and stored.
SQUARE_ROUNDING = 4 * 2.0**-24

# The square below which torch.optim.Adafactor estimates none.
LEAST_SQUARE = torch.finfo(torch.float32).eps


class PlainStep:
    """One step of one parameter.

    Args:
        config: the `optimizer:` section.
        count: steps that were applied, this one included.
        rate: learning rate of the parameter.
        decay: weight decay per unit of the rate.
        share: share of the new fast weights in the average of a schedule-free optimizer.
        found: moments of the run after the step, which say what rounding has decided there.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        count: int,
        rate: float,
        decay: float,
        share: float,
        found: Moments | None = None,
    ) -> None:
        self.found = found or {}
        self.config, self.count, self.rate, self.decay, self.share = (
            config,
            count,
            rate,
            decay,
            share,
        )

    def compute_weight(
        self, name: str, weight: Tensor, gradient: Tensor, moments: Moments
    ) -> Tensor:
        """Return the next weight, and change the moments."""
        config = self.config
        match config:
            case AdamConfig():
                # An L2 penalty, which the moments see.
                return weight - self._take_adam_step(
                    gradient + self.decay * weight, moments, config.betas, config.eps
                )
            case AdamWConfig():
                return self._take_decayed_adam_step(weight, gradient, moments)
            case LionConfig():
                return self._take_lion_step(weight, gradient, moments, config)
            case AdEMAMixConfig():
                return self._take_ademamix_step(weight, gradient, moments, config)
            case ScheduleFreeConfig():
                return self._take_schedule_free_step(weight, gradient, moments, config)
            case MuonConfig() if is_projection(name, weight.ndim):
                return self._take_muon_step(weight, gradient, moments, config)
            case SoapConfig() if is_projection(name, weight.ndim):
                return self._take_soap_step(weight, gradient, moments, config)
            case MuonConfig() | SoapConfig():
                return self._take_decayed_adam_step(weight, gradient, moments)
            case AdafactorConfig():
                return self._take_adafactor_step(weight, gradient, moments, config)
            case PythonOptimizerConfig():
                raise TypeError("a class of the user's own has no plain form")
            case unreachable:
                assert_never(unreachable)

    def find_contained_gradient(
        self, name: str, weight: Tensor, gradient: Tensor, before: Moments, after: Moments
    ) -> Tensor:
        """Return the gradient by which moments changed; `gradient` where they do not tell.

        Args:
            name: name of the parameter.
            weight: the parameter before the step.
            gradient: the plain gradient, which has the sign where a moment has squares only.
            before: moments before the step.
            after: moments of the run after it.
        """
        config = self.config
        if "first_moment" in after:
            if isinstance(config, MuonConfig) and is_projection(name, gradient.ndim):
                beta = config.momentum
            else:
                beta = config.betas[1] if isinstance(config, LionConfig) else config.betas[0]
            if (
                isinstance(config, SoapConfig)
                and self.count == 1
                and is_projection(name, gradient.ndim)
            ):
                return gradient  # its first step only measures
            contained = (after["first_moment"] - beta * before["first_moment"]) / (1 - beta)
            # Adam's moments have seen the decay of the weights, which `compute_weight` adds.
            return contained - self.decay * weight if isinstance(config, AdamConfig) else contained
        if "second_moment" in after:
            beta = (
                config.betas[1]
                if not isinstance(config, AdafactorConfig)
                else 1 - self.count**-config.decay_exponent
            )
            square = (after["second_moment"] - beta * before["second_moment"]) / (1 - beta)
            rounding = SQUARE_ROUNDING * after["second_moment"] / (1 - beta)
            contained = square.clamp(min=0).sqrt() * gradient.sign()
            # Next to a large square of earlier steps a small one is lost.
            return torch.where((square - gradient**2).abs() <= rounding, gradient, contained)
        return gradient

    def _subtract(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return weight - change, decayed; a cautious decay leaves alone what the change moves away
        from zero (Chen 2025, arXiv:2510.12402, algorithm 1).
        """
        decayed = weight * self.rate * self.decay
        if self.config.cautious_weight_decay:
            decayed = decayed.where(change * weight >= 0, 0)
        return weight - decayed - change

    def _take_decayed_adam_step(self, weight: Tensor, gradient: Tensor, moments: Moments) -> Tensor:
        """Return the next weight (Loshchilov and Hutter 2017, algorithm 2)."""
        change = self._take_adam_step(gradient, moments, self.config.betas, self.config.eps)
        return self._subtract(weight, change)

    def _take_adam_step(
        self,
        gradient: Tensor,
        moments: Moments,
        betas: tuple[float, float],
        eps: float,
        count: int | None = None,
    ) -> Tensor:
        """Return rate · m̂ / (√v̂ + ε) (Kingma 2014, algorithm 1)."""
        steps = self.count if count is None else count
        first = betas[0] * moments["first_moment"] + (1 - betas[0]) * gradient
        second = betas[1] * moments["second_moment"] + (1 - betas[1]) * gradient**2
        moments |= {"first_moment": first, "second_moment": second}
        unbiased = second / (1 - betas[1] ** steps)
        return self.rate * first / (1 - betas[0] ** steps) / (unbiased.sqrt() + eps)

    def _take_lion_step(
        self, weight: Tensor, gradient: Tensor, moments: Moments, config: LionConfig
    ) -> Tensor:
        """Return the next weight (Chen 2023, algorithm 2)."""
        momentum = moments["first_moment"]
        direction = (config.betas[0] * momentum + (1 - config.betas[0]) * gradient).sign()
        moments["first_moment"] = config.betas[1] * momentum + (1 - config.betas[1]) * gradient
        return self._subtract(weight, self.rate * direction)

    def _take_ademamix_step(
        self, weight: Tensor, gradient: Tensor, moments: Moments, config: AdEMAMixConfig
    ) -> Tensor:
        """Return the next weight (Pagliardini 2024, algorithm 1); half-lives grow linearly."""
        start, end, warmup = config.betas[0], config.slow_beta, config.slow_warmup_steps
        grown = min(self.count / warmup, 1.0) if warmup else 1.0
        low, high = (math.log(0.5) / math.log(beta) for beta in (start, end))
        slow_beta = 0.5 ** (1 / ((1 - grown) * low + grown * high))
        first = config.betas[0] * moments["first_moment"] + (1 - config.betas[0]) * gradient
        second = config.betas[1] * moments["second_moment"] + (1 - config.betas[1]) * gradient**2
        slow = slow_beta * moments["slow_moment"] + (1 - slow_beta) * gradient
        moments |= {"first_moment": first, "second_moment": second, "slow_moment": slow}
        root = (second / (1 - config.betas[1] ** self.count)).sqrt() + config.eps
        direction = first / (1 - config.betas[0] ** self.count) + grown * config.slow_weight * slow
        return self._subtract(weight, self.rate * direction / root)

    def _take_schedule_free_step(
        self, weight: Tensor, gradient: Tensor, moments: Moments, config: ScheduleFreeConfig
    ) -> Tensor:
        """Return the next y between fast weights z and average x (Defazio 2024, algorithm 1)."""
        beta = config.betas[0]
        fast = weight + moments["lookahead_moment"]
        average = (weight - (1 - beta) * fast) / beta
        second = config.betas[1] * moments["second_moment"] + (1 - config.betas[1]) * gradient**2
        direction = gradient / ((second / (1 - config.betas[1] ** self.count)).sqrt() + config.eps)
        fast = fast - self.rate * (direction + self.decay * weight)
        average = (1 - self.share) * average + self.share * fast
        trained = (1 - beta) * fast + beta * average
        moments |= {"second_moment": second, "lookahead_moment": fast - trained}
        return trained

    def _take_muon_step(
        self, weight: Tensor, gradient: Tensor, moments: Moments, config: MuonConfig
    ) -> Tensor:
        """Return the next weight (Jordan 2024; scale of Moonshot 2025, 2.2; with a moment of
        neurons Li 2025, arXiv:2510.05491, algorithm 1).
        """
        momentum = config.momentum * moments["first_moment"] + (1 - config.momentum) * gradient
        moments["first_moment"] = momentum
        ahead = config.momentum * momentum + (1 - config.momentum) * gradient
        x = ahead / ahead.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        coefficients = [(3.4445, -4.7750, 2.0315)] * config.newton_schulz_steps
        if config.orthogonalization == "polar_express":
            x = x / 1.01
            coefficients = compute_polar_express(config.newton_schulz_steps)
        for a, b, c in coefficients:
            square = x @ x.mT
            x = a * x + b * square @ x + c * square @ square @ x
        if config.neuron_beta is None:
            # An orthogonal matrix has the root mean square 1 / √max(M, N), an AdamW step 0.2.
            return self._subtract(weight, self.rate * 0.2 * math.sqrt(max(weight.shape[-2:])) * x)
        # Stacks of experts are (E, in, out).
        squares = (x**2).mean(-1 if weight.ndim == 2 else -2, keepdim=True)
        moment = config.neuron_beta * moments["neuron_moment"] + (1 - config.neuron_beta) * squares
        moments["neuron_moment"] = moment
        x = x / (moment.sqrt() + config.eps)
        size = (x**2).mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-30)
        return self._subtract(weight, self.rate * 0.2 * x / size)

    def _take_adafactor_step(
        self, weight: Tensor, gradient: Tensor, moments: Moments, config: AdafactorConfig
    ) -> Tensor:
        """Return the next weight (Shazeer 2018, algorithms 4, 5); limits of torch's Adafactor."""
        matrix = tuple(range(-min(2, weight.ndim), 0))
        new = self.count**-config.decay_exponent
        square = gradient**2
        if weight.ndim > 1:
            rows = (1 - new) * moments["row_moment"] + new * square.mean(-1, keepdim=True)
            columns = (1 - new) * moments["column_moment"] + new * square.mean(-2, keepdim=True)
            moments |= {"row_moment": rows, "column_moment": columns}
            estimate = rows * columns / rows.mean(-2, keepdim=True).clamp(min=LEAST_SQUARE)
        else:
            estimate = (1 - new) * moments["second_moment"] + new * square
            moments["second_moment"] = estimate
        update = gradient / estimate.clamp(min=LEAST_SQUARE**2).sqrt()
        size = weight.square().mean(matrix, keepdim=True).sqrt().clamp(min=config.min_weight_size)
        excess = update.square().mean(matrix, keepdim=True).sqrt() / config.clip_threshold
        step = size * min(self.rate, self.count**-0.5)
        return self._subtract(weight, step * update / excess.clamp(min=1.0))

    def _take_soap_step(
        self, weight: Tensor, gradient: Tensor, moments: Moments, config: SoapConfig
    ) -> Tensor:
        """Return the next weight (Vyas 2024, algorithm 3); the first step only measures."""
        sides = {"left": -2, "right": -1}
        rotated = {
            side: dim
            for side, dim in sides.items()
            if weight.shape[dim] <= config.max_precondition_size
        }
        if self.count > 1 or not rotated:
            steps = self.count - 1 if rotated else self.count
            first = config.betas[0] * moments["first_moment"] + (1 - config.betas[0]) * gradient
            inside = _rotate(gradient, moments, rotated)
            second = config.betas[1] * moments["second_moment"] + (1 - config.betas[1]) * inside**2
            moments |= {"first_moment": first, "second_moment": second}
            root = (second / (1 - config.betas[1] ** steps)).sqrt()
            # A direction in which all gradients are rounding gets no step of full length.
            root = root.maximum(SOAP_ROUNDING * root.amax((-2, -1), keepdim=True)) + config.eps
            change = _rotate(_rotate(first, moments, rotated) / root, moments, rotated, back=True)
            weight = self._subtract(weight, self.rate * change / (1 - config.betas[0] ** steps))
        for side in rotated:
            product = gradient @ gradient.mT if side == "left" else gradient.mT @ gradient
            moment = moments[f"{side}_moment"]
            moments[f"{side}_moment"] = (
                config.shampoo_beta * moment + (1 - config.shampoo_beta) * product
            )
        if self.count == 1:
            for side in rotated:
                square = gradient @ gradient.mT if side == "left" else gradient.mT @ gradient
                moments[f"{side}_basis_moment"] = _build_first_basis(square)
        elif (self.count - 1) % config.precondition_every_steps == 0:
            for side, dim in rotated.items():
                _update_basis(moments, side, dim, self.found.get("second_moment"))
        return weight


def _rotate(
    matrix: Tensor, moments: Moments, sides: dict[str, int], *, back: bool = False
) -> Tensor:
    for side in sides:
        basis = moments[f"{side}_basis_moment"]
        turn = basis if back else basis.mT
        matrix = turn @ matrix if side == "left" else matrix @ turn.mT
    return matrix


def _update_basis(moments: Moments, side: str, dim: int, found: Tensor | None) -> None:
    """Take one step of power iteration, sorted by eigenvalues (Vyas 2024, algorithm 4).

    Args:
        moments: the moments; changed.
        side: `left` or `right`.
        dim: the dim of the parameter that the basis turns.
        found: second moment of the run after its step; None: not known.
    """
    basis, product = (
        moments[f"{side}_basis_moment"],
        moments[f"{side}_moment"] @ moments[f"{side}_basis_moment"],
    )
    values = (basis * product).sum(-2)
    # Values below the shift are rounding, and so would be their order.
    shift = (SOAP_ROUNDING * values.amax(-1, keepdim=True)).clamp(min=LEAST_SQUARE**2)
    order = values.maximum(shift).argsort(dim=-1, descending=True, stable=True)
    if found is not None:
        # A length does not depend on the order along the other dim.
        lengths, theirs = (one.norm(dim=-3 - dim) for one in (moments["second_moment"], found))
        order = follow_ties(order, values, lengths, theirs)
    ahead = order[..., :, None] if dim == -2 else order[..., None, :]
    moments["second_moment"] = moments["second_moment"].take_along_dim(ahead, dim)
    shifted = product + basis * shift[..., None]
    vectors, triangle = torch.linalg.qr(shifted.take_along_dim(order[..., None, :], -1))
    # A vector keeps its direction.
    signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
    moments[f"{side}_basis_moment"] = vectors * signs[..., None, :]


def follow_ties(order: Tensor, values: Tensor, lengths: Tensor, found: Tensor) -> Tensor:
    """Return the order in which a run has put eigenvalues that are equal but for rounding.

    Args:
        order: of one or several matrices, largest value first, each shaped (…, N).
        values: the eigenvalues.
        lengths: of the squares that belong to each, before they are sorted.
        found: those of the run, sorted.
    """
    size = order.shape[-1]
    flat = [one.reshape(-1, size).tolist() for one in (order, values, lengths, found)]
    for places, own_values, own, theirs in zip(*flat, strict=True):
        rounding = EIGENVALUE_ROUNDING * max(own_values)
        is_changed = True
        while is_changed:
            is_changed = False
            for here in range(size - 1):
                one, other = places[here], places[here + 1]
                kept = abs(own[one] - theirs[here]) + abs(own[other] - theirs[here + 1])
                swapped = abs(own[other] - theirs[here]) + abs(own[one] - theirs[here + 1])
                if abs(own_values[one] - own_values[other]) <= rounding and swapped < kept:
                    places[here], places[here + 1] = other, one
                    is_changed = True
    return torch.tensor(flat[0]).view_as(order)


def _build_first_basis(square: Tensor) -> Tensor:
    """Return eigenvectors, largest first; those of the null space by falling weights of axes."""
    values, vectors = (one.flip(-1) for one in torch.linalg.eigh(square))
    flat_values = values.reshape(-1, values.shape[-1])
    flat_vectors = vectors.reshape(-1, *vectors.shape[-2:])
    bases = []
    for of_one, basis in zip(flat_values, flat_vectors, strict=True):
        rank, size = int((of_one > of_one[0] * SOAP_ROUNDING**2).sum()), len(of_one)
        inside = basis[:, :rank]
        onto_null = torch.eye(size, dtype=basis.dtype) - inside @ inside.mT
        falling = torch.linspace(2, 1, size, dtype=basis.dtype).diag()
        null = torch.linalg.eigh(onto_null @ falling @ onto_null)[1].flip(-1)
        bases.append(torch.cat([inside, null[:, : size - rank]], 1))
    return torch.stack(bases).view_as(vectors)


def compute_polar_express(steps: int) -> list[tuple[float, float, float]]:
    """Return the coefficients of each step (Amsel 2025, arXiv:2505.16932, algorithm 2 and 3.4).

    Each is the odd polynomial of degree 5 with the least largest distance from 1 on the interval
    that the steps before it leave, by Remez's exchange of four points; its lower end counts as at
    least 0.02407 of the upper one. All but the last one of the paper's eight are then scaled for
    values larger by a hundredth.

    Args:
        steps: Number of steps.
    """
    low, high = 1e-3, 1.0
    found = []
    for number in range(steps):
        fitted = max(low, 0.02407327424182761 * high)
        a, b, c = _fit_quintic(fitted, high)
        # Around 1 on the whole interval.
        ends = [a * at + b * at**3 + c * at**5 for at in (low, high)]
        a, b, c = (2 / sum(ends) * one for one in (a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        safety = 1.01 if number < 7 else 1.0
        found.append((a / safety, b / safety**3, c / safety**5))
    return found


def _fit_quintic(low: float, high: float) -> tuple[float, float, float]:
    if low / high > 1 - 5e-6:
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    for _ in range(100):
        rows = [
            [at, at**3, at**5, sign]
            for at, sign in zip((low, *inner, high), (1, -1, 1, -1), strict=True)
        ]
        solved = torch.linalg.solve(
            torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        )
        a, b, c, _ = solved.tolist()
        # The extrema: a + 3 b x² + 5 c x⁴ = 0.
        root = math.sqrt(9 * b**2 - 20 * a * c)
        inner = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    return a, b, c


def is_projection(name: str, num_dims: int) -> bool:
    """Return whether a parameter is a matrix of a block, or a stack of them: `…_proj`."""
    return num_dims >= 2 and "bias" not in name.rpartition(".")[2] and "_proj" in name


def list_moment_names(
    config: OptimizerConfig, name: str, shape: torch.Size
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each moment of a parameter before the first step."""
    plain, is_matrix = tuple(shape), is_projection(name, len(shape))
    adam = {"first_moment": plain, "second_moment": plain}
    match config:
        case LionConfig():
            return {"first_moment": plain}
        case AdEMAMixConfig():
            return adam | {"slow_moment": plain}
        case ScheduleFreeConfig():
            return {"second_moment": plain, "lookahead_moment": plain}
        case MuonConfig(neuron_beta=None) if is_matrix:
            return {"first_moment": plain}
        case MuonConfig() if is_matrix:
            neurons = (plain[0], 1) if len(plain) == 2 else (plain[0], 1, plain[2])
            return {"first_moment": plain, "neuron_moment": neurons}
        case AdafactorConfig() if len(shape) > 1:
            return {"row_moment": (*plain[:-1], 1), "column_moment": (*plain[:-2], 1, plain[-1])}
        case AdafactorConfig():
            return {"second_moment": plain}
        case SoapConfig() if is_matrix:
            found: dict[str, tuple[int, ...]] = dict(adam)
            for side, size in (("left", plain[-2]), ("right", plain[-1])):
                if size <= config.max_precondition_size:
                    square = (*plain[:-2], size, size)
                    found |= {f"{side}_moment": square, f"{side}_basis_moment": square}
            return found
        case AdamWConfig() | MuonConfig() | SoapConfig():
            return adam
        case PythonOptimizerConfig():
            raise TypeError("a class of the user's own has no plain form")
        case unreachable:
            assert_never(unreachable)
