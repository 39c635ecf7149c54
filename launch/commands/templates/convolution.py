"""Convolutions instead of attention, to copy and change. Run this file to test them.

model:
  attention:
    kind: python
    path: my_convolution.py:GatedConvolution   # or DilatedConvolution
    options: {kernel: 3}
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from llmsys.config.block_measurement import BlockShape
from llmsys.config.model import ModelConfig
from llmsys.model.python_block import MixerContext, PythonMixer
from llmsys.model.python_block_check import check_python_block

# B rows, T positions, D width, J taps of a kernel


class GatedConvolution(PythonMixer):
    """A convolution and a gated linear unit, as in each layer of ConvS2S (Gehring 2017,
    arXiv:1705.03122, 3.2).

    The residual connection is the model's.
    """

    masks_documents = True
    kernel: int = Field(3, ge=1, description="Positions that an output reads.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        return GatedConvolutionModule(shape, self.kernel)

    def list_parameters(self, shape: BlockShape) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters."""
        width = shape.hidden_size
        return {
            "taps_proj.weight": (2 * width, self.kernel * width),
            "taps_proj.bias": (2 * width,),
        }

    def count_flops(self, shape: BlockShape, length: int, documents: tuple[int, ...]) -> int:
        """Return the FLOPs of the convolution, which multiplies masked positions too."""
        return 4 * length * self.kernel * shape.hidden_size**2


class GatedConvolutionModule(nn.Module):
    """v([a; b]) = a · sigmoid(b), where [a; b] is a convolution of the input."""

    def __init__(self, shape: BlockShape, kernel: int) -> None:
        super().__init__()
        self.offsets = list_offsets(kernel, 1, is_causal=shape.is_causal)
        self.taps_proj = nn.Linear(kernel * shape.hidden_size, 2 * shape.hidden_size)

    def forward(self, x_BTD: Tensor, context: MixerContext) -> Tensor:
        """Return the mixed states, in the shape and dtype of the input."""
        return F.glu(self.taps_proj(gather_taps(x_BTD, self.offsets, context)))


class DilatedConvolution(PythonMixer):
    """ByteNet's residual block with ReLU (Kalchbrenner 2016, arXiv:1610.10099, 3.5): half of the
    channels, a dilated convolution between two projections, and norms.

    The dilation doubles from layer to layer and begins anew after `period` of them. The first norm
    and the residual connection are the model's (`model.residual.kind=pre`).
    """

    masks_documents = True
    kernel: int = Field(3, ge=1, description="Positions that an output reads.")
    period: int = Field(5, ge=1, description="Layers until the dilation is 1 again.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        return DilatedConvolutionModule(shape, self.kernel, 2 ** (shape.layer % self.period))

    def list_parameters(self, shape: BlockShape) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters."""
        width, half = shape.hidden_size, shape.hidden_size // 2
        layers = {"in_proj": (half, width), "taps_proj": (half, self.kernel * half)}
        layers |= {"o_proj": (width, half)}
        sizes: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in layers.items():
            sizes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        for name in ("in_norm", "taps_norm"):
            sizes |= {f"{name}.weight": (half,), f"{name}.bias": (half,)}
        return sizes

    def count_flops(self, shape: BlockShape, length: int, documents: tuple[int, ...]) -> int:
        """Return the FLOPs of both projections and the convolution."""
        width, half = shape.hidden_size, shape.hidden_size // 2
        return 2 * length * (2 * width * half + self.kernel * half**2)


class DilatedConvolutionModule(nn.Module):
    """Projection, convolution and projection, each after ReLU; the outer norm is the model's."""

    def __init__(self, shape: BlockShape, kernel: int, dilation: int) -> None:
        super().__init__()
        half = shape.hidden_size // 2
        self.offsets = list_offsets(kernel, dilation, is_causal=shape.is_causal)
        self.in_proj = nn.Linear(shape.hidden_size, half)
        self.in_norm = nn.LayerNorm(half)
        self.taps_proj = nn.Linear(kernel * half, half)
        self.taps_norm = nn.LayerNorm(half)
        self.o_proj = nn.Linear(half, shape.hidden_size)

    def forward(self, x_BTD: Tensor, context: MixerContext) -> Tensor:
        """Return the mixed states, in the shape and dtype of the input."""
        inner_BTD = self.in_norm(self.in_proj(x_BTD.relu())).relu()
        inner_BTD = self.taps_proj(gather_taps(inner_BTD, self.offsets, context))
        mixed_BTD: Tensor = self.o_proj(self.taps_norm(inner_BTD).relu())
        return mixed_BTD


def list_offsets(kernel: int, dilation: int, *, is_causal: bool) -> list[int]:
    """Return the distances back to the positions that an output reads; negative: ahead."""
    ahead = 0 if is_causal else kernel // 2
    return [dilation * (tap - ahead) for tap in range(kernel)]


def gather_taps(x_BTD: Tensor, offsets: list[int], context: MixerContext) -> Tensor:
    """Return the positions that each output reads, joined, (B, T, J · D).

    Positions outside of the row or of the document are zeros, as the padding of a convolution.
    """
    length = x_BTD.shape[1]
    places_T = torch.arange(length, device=x_BTD.device)
    taps = []
    for offset in offsets:
        read_T = places_T - offset
        is_read_BT = ((read_T >= 0) & (read_T < length))[None]
        read_T = read_T.clamp(0, length - 1)
        if context.documents_BT is not None:
            same_BT = context.documents_BT[:, read_T] == context.documents_BT
            is_read_BT = is_read_BT & same_BT
        taps.append(x_BTD[:, read_T] * is_read_BT[..., None])
    return torch.cat(taps, dim=-1)


if __name__ == "__main__":
    for mixer in (GatedConvolution(), DilatedConvolution()):
        check_python_block(
            mixer,
            ModelConfig(
                vocab_size=100,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
            ),
        )
    print("no position reads later ones or other documents, and every parameter is used")
