"""Image patches as positions, and learned positions that are interpolated to other image sizes
(ViT).

Images come as the bytes of their patches, (B, N, P) uint8: rows of patches from top to bottom, in a
patch its channels, rows and columns, in the order of a convolution's weight.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.patches import PatchesConfig
from llmsys.config.position import LearnedPositionConfig
from llmsys.errors import ConfigError
from llmsys.model.embedding import LearnedPositionEmbedding, TokenEmbedding
from llmsys.model.float32_buffers import Float32BufferModule

# B images, N patches, P values of a patch, T positions, D width, S patches of a side


class PatchEmbedding(Float32BufferModule):
    """A linear map of normalized patches, after a class token (Dosovitskiy 2020, equation 1)."""

    scale_P: Tensor
    shift_P: Tensor

    def __init__(self, patches: PatchesConfig, width: int) -> None:
        super().__init__()
        self.patches = patches
        self.weight = nn.Parameter(torch.empty(width, patches.patch_values).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(width))
        self.class_token = (
            nn.Parameter(torch.empty(width).normal_(std=0.02)) if patches.class_token else None
        )
        for name in ("scale_P", "shift_P"):
            self.register_buffer(name, torch.empty(patches.patch_values), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set scale and shift of (value / 255 - mean) / std, for instance after `to_empty`."""
        area = self.patches.patch_size**2
        mean_C, std_C = (
            torch.tensor(self.patches.list_channel_values(one))
            for one in (self.patches.mean, self.patches.std)
        )
        self.scale_P.copy_((1 / (255 * std_C)).repeat_interleave(area))
        self.shift_P.copy_((mean_C / std_C).repeat_interleave(area))

    def forward(self, patches_BNP: Tensor) -> Tensor:
        """Embed the patches of images.

        Args:
            patches_BNP: bytes of each patch, (B, N, P) uint8.

        Returns:
            (B, T, D) in the dtype of the weight; T is N, or N + 1 with a class token, which is
            first.
        """
        values_BNP = (patches_BNP.float() * self.scale_P - self.shift_P).to(self.weight.dtype)
        x_BND = F.linear(values_BNP, self.weight, self.bias)
        if self.class_token is None:
            return x_BND
        return torch.cat([self.class_token.to(x_BND.dtype).expand(len(x_BND), 1, -1), x_BND], dim=1)


def build_input_embedding(config: ModelConfig) -> TokenEmbedding | PatchEmbedding:
    """Build the map from the inputs of a model to vectors.

    Args:
        config: The model.

    Returns:
        A `PatchEmbedding` for images (bytes (B, N, P)), else a `TokenEmbedding` (ids (B, T)).
    """
    if config.patches is not None:
        return PatchEmbedding(config.patches, config.hidden_size)
    return TokenEmbedding(config.vocab_size, config.hidden_size)


class PatchPositionEmbedding(LearnedPositionEmbedding):
    """A trained vector for every patch of a grid and for the class token."""

    def __init__(
        self, config: ModelConfig, position: LearnedPositionConfig, patches: PatchesConfig
    ) -> None:
        super().__init__(config, position)
        self.num_leading = patches.num_leading

    def forward(self, positions_BT: Tensor) -> Tensor:
        """Look up the vectors of positions.

        Args:
            positions_BT: All positions of an image. Where their number is not that of the table,
                the image has another size, and the table is interpolated.

        Returns:
            (..., T, D).
        """
        if positions_BT.shape[-1] == len(self.weight):
            return super().forward(positions_BT)
        return self.interpolate(positions_BT.shape[-1])[None]

    def interpolate(self, positions: int) -> Tensor:
        """Return the vectors of a grid of `positions`, bicubic as in Hugging Face's ViT, (T, D).

        Raises:
            ConfigError: The number of patches is not a square.
        """
        leading_LD, patches_ND = self.weight.float().split(
            [self.num_leading, len(self.weight) - self.num_leading]
        )
        side = math.isqrt(positions - self.num_leading)
        if side * side != positions - self.num_leading:
            raise ConfigError(
                f"{positions - self.num_leading} patches are not a square, and images must be. "
                f"Use {side * side}."
            )
        grid_1DSS = patches_ND.unflatten(0, (math.isqrt(len(patches_ND)), -1)).permute(2, 0, 1)[
            None
        ]
        resized_1DSS = F.interpolate(
            grid_1DSS, size=(side, side), mode="bicubic", align_corners=False
        )
        return torch.cat([leading_LD, resized_1DSS[0].flatten(1).T]).to(self.weight.dtype)


def build_learned_positions(
    config: ModelConfig, position: LearnedPositionConfig
) -> LearnedPositionEmbedding:
    """Build the table of learned positions.

    Args:
        config: The model; images have one position for each patch.
        position: The section `model.position`.

    Returns:
        A module that returns one vector for each position.
    """
    if config.patches is not None:
        return PatchPositionEmbedding(config, position, config.patches)
    return LearnedPositionEmbedding(config, position)
