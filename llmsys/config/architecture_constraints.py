"""Rules between the architecture and other sections of a run: images, chats, and reversible
layers.
"""

from collections.abc import Iterator
from typing import Protocol

from llmsys.config.batch import BatchConfig
from llmsys.config.data import DataConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.images import ImagesConfig
from llmsys.config.model import ModelConfig
from llmsys.config.objective import ClassificationConfig, ObjectiveConfig
from llmsys.config.section import find_nearest_multiples
from llmsys.config.tokenizer import TokenizerConfig
from llmsys.config.train import TrainConfig
from llmsys.errors import Violation, format_choices


class RunSections(Protocol):
    """The sections of a RunConfig that are read here."""

    @property
    def model_fields_set(self) -> set[str]:
        """Names of the sections that were given."""

    @property
    def data(self) -> DataConfig:
        """Dataset."""

    @property
    def tokenizer(self) -> TokenizerConfig:
        """Tokenizer."""

    @property
    def model(self) -> ModelConfig:
        """Architecture."""

    @property
    def objective(self) -> ObjectiveConfig:
        """Training objective."""

    @property
    def batch(self) -> BatchConfig:
        """Global batch."""

    @property
    def train(self) -> TrainConfig:
        """Budget and precision."""

    @property
    def engine(self) -> EngineConfig:
        """Engine."""


def find_architecture_violations(run: RunSections) -> Iterator[Violation]:
    """Yield what does not fit between the architecture and other sections.

    Args:
        run: the run.
    """
    yield from _find_image_violations(run)
    if run.model.residual.is_reversible:
        yield from _find_reversible_violations(run.train, run.engine)


def _find_reversible_violations(train: TrainConfig, engine: EngineConfig) -> Iterator[Violation]:
    if train.activation_checkpoint != "none":
        text = (
            f"{train.activation_checkpoint} recomputes blocks, as model.residual.kind=reversible "
            "does. Use none."
        )
        yield Violation("train.activation_checkpoint", text)
    if train.compile == "block":
        yield Violation(
            "train.compile", "block is not proven with model.residual.kind=reversible. Use none."
        )
    if engine.kind == "deepspeed" and engine.zero_stage == 3:
        text = (
            "3 gathers the weights of a block for one pass, but model.residual.kind=reversible "
            "repeats its branches"
        )
        yield Violation("engine.zero_stage", f"{text}. Use zero_stage=2, or engine.kind=torch.")


def _find_image_violations(run: RunSections) -> Iterator[Violation]:
    has_images, objective = isinstance(run.data, ImagesConfig), run.objective
    if (
        isinstance(objective, ClassificationConfig)
        and objective.augmentation is not None
        and not has_images
    ):
        text = (
            f"data.kind={run.data.kind} has no images to change. Leave augmentation out, or use "
            "data.kind=images."
        )
        yield Violation("objective.augmentation", text)
    if (run.tokenizer.kind == "none") != has_images:
        use = "none" if has_images else "sentencepiece or file"
        text = (
            f"{run.tokenizer.kind} does not fit data.kind={run.data.kind}: images alone have no "
            f"text. Use {use}."
        )
        yield Violation("tokenizer.kind", text)
    if run.data.kind == "tokens" and run.tokenizer.kind != "file":
        text = (
            f"{run.tokenizer.kind} is trained on text, and data.kind=tokens has ids. Use file, "
            "and path: their own."
        )
        yield Violation("tokenizer.kind", text)
    if run.data.kind == "chat":
        yield from _find_chat_violations(run)
    if isinstance(run.data, ImagesConfig):
        if "model" in run.model_fields_set:
            yield from _find_size_violations(run.data, run.model, run.batch.sequence_length)
    elif run.model.patches is not None and "data" in run.model_fields_set:
        text = (
            f"{run.data.kind} data have no images, which model.patches needs. Use data.kind=images."
        )
        yield Violation("data.kind", text)


def _find_chat_violations(run: RunSections) -> Iterator[Violation]:
    if run.tokenizer.kind != "file":
        text = (
            f"{run.tokenizer.kind} has no chat template. Use file, and path: the tokenizer of the "
            "model that is tuned."
        )
        yield Violation("tokenizer.kind", text)
    if run.batch.attention_scope != "document":
        text = (
            f"{run.batch.attention_scope} would show a chat the others of its sequence. Use "
            "document."
        )
        yield Violation("batch.attention_scope", text)


def _find_size_violations(
    data: ImagesConfig, model: ModelConfig, sequence_length: int
) -> Iterator[Violation]:
    size, patches = data.image_size, model.patches
    if patches is None:
        yield Violation(
            "model.patches",
            "data.kind=images has no token ids. Set patches.image_size and patch_size.",
        )
        return
    if patches.num_channels != data.num_channels:
        text = (
            f"{patches.num_channels} differs from data.num_channels={data.num_channels}. Use "
            f"{data.num_channels}."
        )
        yield Violation("model.patches.num_channels", text)
    if size % patches.patch_size:
        legal = format_choices(find_nearest_multiples(size, patches.patch_size))
        text = (
            f"{size} pixels are not a whole number of patches of {patches.patch_size}. Use {legal}."
        )
        yield Violation("data.image_size", text)
        return
    wanted = patches.count_positions(size)
    if wanted > model.max_position_embeddings and not model.interpolates_positions:
        text = f"{size} pixels are {wanted} positions, and only learned ones are interpolated"
        yield Violation(
            "data.image_size", f"{text}. Use {patches.image_size}, or position.kind=learned."
        )
    if sequence_length != wanted:
        text = (
            f"{sequence_length} is not the {wanted} positions of data.image_size={size}. Use "
            f"{wanted}."
        )
        yield Violation("batch.sequence_length", text)
