"""Image patches instead of token ids: the `model.patches` section (ViT; Dosovitskiy 2020,
arXiv:2010.11929).
"""

from collections.abc import Iterator

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.position import LearnedPositionConfig, PositionConfig
from llmsys.config.section import Section, find_nearest_multiples
from llmsys.errors import Violation, format_choices

# Values of a channel of a pixel, which are the vocabulary of images.
BYTE_VALUES = 256


class PatchesConfig(Section):
    """Square patches of an image, each mapped to one position (Dosovitskiy 2020, 3.1).

    An image of another size than `image_size` has another number of positions; learned positions
    are interpolated.
    """

    image_size: int = Field(
        ge=1, description="Height and width of the images that learned positions belong to."
    )
    patch_size: int = Field(ge=1, description="Height and width of a patch, in pixels.")
    num_channels: int = Field(3, ge=1, description="Channels of a pixel: 3 for colour, 1 for grey.")
    class_token: bool = Field(
        True, description="Put a trained vector before the patches, for head.pooling=first."
    )
    mean: tuple[float, ...] = Field(
        (0.5,), min_length=1, description="Mean of a channel, of values from 0 to 1."
    )
    std: tuple[float, ...] = Field(
        (0.5,), min_length=1, description="Standard deviation of a channel, likewise."
    )

    @property
    def patch_values(self) -> int:
        """Values of one patch, over all channels."""
        return self.num_channels * self.patch_size**2

    @property
    def num_leading(self) -> int:
        """Positions before the patches."""
        return int(self.class_token)

    def count_positions(self, image_size: int) -> int:
        """Count the positions that the model has for an image.

        Args:
            image_size: Height and width in pixels, a multiple of `patch_size`.

        Returns:
            The patches, and the class token where there is one.
        """
        return (image_size // self.patch_size) ** 2 + self.num_leading

    def list_channel_values(self, values: tuple[float, ...]) -> list[float]:
        """Repeat a setting of all channels for each of them.

        Args:
            values: One value per channel, or a single one for all: `mean` or `std`.

        Returns:
            A value for each channel.
        """
        return list(values) * (self.num_channels if len(values) == 1 else 1)

    def iter_parameters(self, width: int) -> Iterator[ParameterTensor]:
        """Yield the map of a patch to `width` channels, and the class token."""
        yield ParameterTensor(
            "embed.weight", (width, self.patch_values), "embedding", input="patch", cut_steps=1
        )
        yield ParameterTensor("embed.bias", (width,), "embedding")
        if self.class_token:
            yield ParameterTensor("embed.class_token", (width,), "embedding")

    def find_violations(
        self, model: ModelShape, family: str, head: str, position: PositionConfig
    ) -> Iterator[Violation]:
        """Yield what does not fit the other fields of the model, with keys below `model`."""
        if family != "encoder" or head not in ("classification", "features"):
            yield Violation(
                "patches",
                f"images need family=encoder with head=classification or features, not {family} "
                f"with {head}."
                " Change them, or leave patches out.",
            )
        if model.vocab_size != BYTE_VALUES:
            yield Violation(
                "vocab_size",
                f"{model.vocab_size} is not the {BYTE_VALUES} values of a byte. Use {BYTE_VALUES}.",
            )
        if self.image_size % self.patch_size:
            legal = format_choices(find_nearest_multiples(self.image_size, self.patch_size))
            yield Violation(
                "patches.image_size",
                f"{self.image_size} pixels are not a whole number of patches of "
                f"{self.patch_size}. Use {legal}.",
            )
        elif (longest := model.max_position_embeddings) != (
            wanted := self.count_positions(self.image_size)
        ):
            yield Violation(
                "max_position_embeddings",
                f"{longest} is not the {wanted} positions of "
                f"patches.image_size={self.image_size}. Use {wanted}.",
            )
        if isinstance(position, LearnedPositionConfig) and position.offset:
            yield Violation(
                "position.offset", f"{position.offset} rows would have no patch. Use 0."
            )
        for key in ("mean", "std"):
            if len(given := getattr(self, key)) not in (1, self.num_channels):
                yield Violation(
                    f"patches.{key}",
                    f"{len(given)} values for {self.num_channels} channels. Give one, or "
                    f"{self.num_channels}.",
                )
        if min(self.std) <= 0:
            yield Violation("patches.std", f"{min(self.std)} is no deviation. Use more than 0.")
