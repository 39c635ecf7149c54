"""AdamW whose moments are stored in bfloat16 or 8 bits, and computed in float32.

- `bf16`: two bytes per moment.
- `int8`: one byte per moment, and a float32 scale for each block of up to BLOCK neighbours in the
  last dim (Dettmers 2021, arXiv:2110.02861, has blocks of 2048 and other codes). The codes are
  companded: a first moment is ±(code / 127)² · scale, a second moment (code / 255)⁴ · scale, so
  that values far below the largest of their block keep their size. Vectors (norm weights, biases)
  keep float32.

Invariants:
- Rounding is stochastic, hence right on average: rounded to nearest, a moment would stop moving
  when a step changes it by less than half of the distance between two codes (with beta2 = 0.999 in
  bfloat16, it does so always).
- A second moment above zero is never stored as zero: the next update would be divided by almost
  nothing.
- Random numbers follow from the step and the parameter's name, so that a resumed run repeats them,
  and the copies of a tied embedding on two stages of a pipeline stay equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from llmsys.config.optimizer import MAX_UPDATED_ELEMENTS, MomentsDtype, get_moment_block
from llmsys.data.shuffle import derive_order_key
from llmsys.errors import ConfigError
from llmsys.model.local_tensor import get_local_tensor
from llmsys.optim.elementwise import apply_weight_decay

MOMENTS = ("exp_avg", "exp_avg_sq")
CODE_DTYPES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}


class CompressedAdamW(torch.optim.Optimizer):
    """AdamW (Kingma 2014; Loshchilov and Hutter 2017) with compressed moments. Parameters may be
    DTensors.

    Args:
        groups: Parameter groups, as for every torch optimizer.
        moments: How moments are stored.
        names: Name of each parameter.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        is_cautious: See `apply_weight_decay`.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        moments: Literal["bf16", "int8"],
        names: Mapping[Tensor, str],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        is_cautious: bool = False,
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._is_cautious = is_cautious
        # By name: the number of a parameter depends on the stage of a pipeline.
        self._names = {parameter: names[parameter] for parameter in self._iter_parameters()}
        for parameter in self._iter_parameters():
            # On the host: each step reads it.
            self.state[parameter] = {"step": torch.zeros(())}
            for name in MOMENTS:
                self.state[parameter] |= _build_moment(parameter, name, moments)

    def _iter_parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step from the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group, self._names[parameter])

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any], name: str) -> None:
        state = self.state[parameter]
        state["step"] += 1
        step = int(state["step"])
        assert parameter.grad is not None
        # A hash: torch takes seeds of 63 bits, and on CPUs their lowest 32 alone.
        seed = derive_order_key("moments", name, step) >> 1
        generator = torch.Generator(get_local_tensor(parameter).device).manual_seed(seed)
        tensors = {"weight": parameter, "gradient": parameter.grad, **state}
        del tensors["step"]
        for piece in _iter_pieces(
            {name: get_local_tensor(value) for name, value in tensors.items()}
        ):
            _update_piece(piece, group, step, generator, is_cautious=self._is_cautious)


def _build_moment(parameter: Tensor, name: str, moments: MomentsDtype) -> dict[str, Tensor]:
    """Return the tensors of one moment, all zero: values, or codes with their scales."""
    match moments:
        case "int8" if parameter.dim() > 1:
            codes = torch.zeros_like(parameter, dtype=CODE_DTYPES[name], requires_grad=False)
            return {name: codes, f"{name}_scale": _build_scales(parameter)}
        case "fp32" | "int8":
            return {name: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}
        case "bf16":
            return {name: torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)}
        case unreachable:
            assert_never(unreachable)


def _build_scales(parameter: Tensor) -> Tensor:
    """Return one float32 scale for each block of a matrix, sharded as the matrix is."""
    block = get_moment_block(parameter.shape[-1])
    local = get_local_tensor(parameter)
    if local.shape[-1] % block:
        raise ConfigError(
            f"optimizer.moments=int8 has one scale for {block} neighbours, but this rank holds "
            f"{local.shape[-1]} of {parameter.shape[-1]} columns. Use ranks that hold whole blocks "
            "of them, or optimizer.moments=bf16."
        )
    scales = local.new_zeros(*local.shape[:-1], local.shape[-1] // block, dtype=torch.float32)
    if local is parameter:
        return scales
    shape = torch.Size([*parameter.shape[:-1], parameter.shape[-1] // block])
    stride = torch.empty(shape, device="meta").stride()
    dtensor: Any = parameter
    scales_dtensor: Tensor = type(dtensor).from_local(
        scales, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=stride
    )
    return scales_dtensor


def _iter_pieces(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield views of some rows of all tensors; scales have as many rows as their matrix."""
    width = max(1, tensors["weight"].shape[-1]) if tensors["weight"].dim() > 1 else 1
    rows = {
        name: value.view(-1, value.shape[-1]) if value.dim() > 1 else value
        for name, value in tensors.items()
    }
    size = max(1, MAX_UPDATED_ELEMENTS // width)
    for start in range(0, len(rows["weight"]), size):
        yield {name: value[start : start + size] for name, value in rows.items()}


def _update_piece(
    piece: dict[str, Tensor],
    group: dict[str, Any],
    step: int,
    generator: torch.Generator,
    *,
    is_cautious: bool,
) -> None:
    beta1, beta2 = group["betas"]
    weight = piece["weight"]
    gradient = piece["gradient"].float()
    first = expand_moment(piece, "exp_avg").lerp_(gradient, 1 - beta1)
    second = (
        expand_moment(piece, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    )
    root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    share = group["lr"] * group["weight_decay"]
    # The root is positive: the change has the sign of the first moment.
    apply_weight_decay(weight, first, share, is_cautious=is_cautious)
    weight.addcdiv_(first, root, value=-group["lr"] / (1 - beta1**step))
    store_moment(piece, "exp_avg", first, generator)
    store_moment(piece, "exp_avg_sq", second, generator)


def expand_moment(state: dict[str, Tensor], name: str) -> Tensor:
    """Expand a stored moment to float32.

    In 8 bits a block has one scale, its largest value. Stored numbers are the root of a first
    moment and the fourth root of a second one, relative to it: small values need more of the
    steps than large ones.

    Args:
        state: Tensors of one parameter: `name`, and in 8 bits `name`_scale.
        name: "exp_avg" or "exp_avg_sq".

    Returns:
        A new tensor in the shape of the parameter.
    """
    stored = state[name]
    scales = state.get(f"{name}_scale")
    if scales is None:
        return stored.to(torch.float32, copy=True)
    if name == "exp_avg":
        share = stored.float().div_(127)
        share = share.mul_(share.abs())
    else:
        share = stored.float().div_(255).square_().square_()
    blocks = share.view(*scales.shape, -1)
    return blocks.mul_(scales[..., None]).view(stored.shape)


def store_moment(
    state: dict[str, Tensor], name: str, value: Tensor, generator: torch.Generator
) -> None:
    """Write a float32 moment into its stored form, rounded stochastically.

    Args:
        state: See `expand_moment`; changed in place.
        name: See `expand_moment`.
        value: The moment.
        generator: Source of the rounding.
    """
    stored = state[name]
    scales = state.get(f"{name}_scale")
    if stored.dtype == torch.float32:
        stored.copy_(value)
    elif scales is None:
        stored.copy_(_round_to_bfloat16(value, generator))
    else:
        blocks = value.view(*scales.shape, -1)
        scales.copy_(blocks.abs().amax(-1))
        # A block of zeros has codes of zero.
        share = (blocks / scales[..., None].clamp(min=torch.finfo(torch.float32).tiny)).view(
            value.shape
        )
        noise = torch.rand(value.shape, generator=generator, device=value.device)
        if name == "exp_avg":
            stored.copy_(
                share.abs()
                .sqrt_()
                .mul_(127)
                .add_(noise)
                .floor_()
                .clamp_(max=127)
                .mul_(share.sign())
            )
        else:
            codes = share.sqrt().sqrt_().mul_(255).add_(noise).floor_().clamp_(max=255)
            stored.copy_(torch.where(share > 0, codes.clamp_(min=1), 0))


def _round_to_bfloat16(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return a neighbouring bfloat16, the nearer one with the higher probability."""
    bits = value.view(torch.int32)
    noise = torch.randint(
        1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32
    )
    # A carry out of the lower 16 bits moves to the next bfloat16; what is left of them is cut off.
    return (bits + noise & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
