"""Build what changes the rows of an objective: masks, spans, pairs of segments, and augmented
images.
"""

from typing import assert_never

from llmsys.config.objective import (
    ClassificationConfig,
    MaskedLmConfig,
    NextSentenceConfig,
    PermutationConfig,
    SpanCorruptionConfig,
    TranslationConfig,
)
from llmsys.config.run import RunConfig
from llmsys.data.fill_in_middle import MiddleFiller, MiddleTokens
from llmsys.data.images import build_image_layout
from llmsys.data.masking import (
    ReadWindows,
    SegmentPairs,
    SpanCorruptor,
    TokenMasker,
    WindowTransform,
)
from llmsys.data.permutation import PermutationSampler
from llmsys.data.sequence_pairs import SequencePairs
from llmsys.dataset.token_shards import TokenShards
from llmsys.errors import ConfigError
from llmsys.vocabulary.tokenizer import Tokenizer

PairObjective = TranslationConfig | ClassificationConfig
HidingObjective = MaskedLmConfig | NextSentenceConfig | PermutationConfig | SpanCorruptionConfig


def build_augmentation(
    config: RunConfig, objective: PairObjective, pairs: SequencePairs
) -> WindowTransform | None:
    """Build the augmentation of training images.

    Args:
        config: the config of the run.
        objective: its objective.
        pairs: the training pairs, whose fingerprint is part of the random key.

    Returns:
        The augmentation; None for texts, and where none is asked for.
    """
    layout = build_image_layout(config)
    if (
        layout is None
        or not isinstance(objective, ClassificationConfig)
        or objective.augmentation is None
    ):
        return None
    from llmsys.data.image_augmentation import ImageAugmenter  # torchvision, which is optional

    return ImageAugmenter(objective.augmentation, layout, (pairs.fingerprint, config.run.seed))


def build_transform(
    config: RunConfig,
    objective: HidingObjective,
    tokenizer: Tokenizer,
    key: tuple[str | int, ...],
    read_windows: ReadWindows,
) -> WindowTransform:
    """Build what hides tokens of windows.

    Args:
        config: the config of the run.
        objective: its objective.
        tokenizer: the tokenizer that has the special tokens.
        key: key of the random choices.
        read_windows: reads windows by number, for second segments.

    Returns:
        The transform.

    Raises:
        ConfigError: the tokenizer lacks a token of the objective.
    """
    match objective:
        case MaskedLmConfig() | NextSentenceConfig():
            [mask] = _find_tokens(tokenizer, [objective.mask_token], "objective.mask_token")
            masker = TokenMasker(objective, mask, tokenizer.eos_id, tokenizer.vocab_size, key)
            if isinstance(objective, MaskedLmConfig):
                return masker
            names = [objective.cls_token, objective.sep_token]
            cls_token, sep_token = _find_tokens(tokenizer, names, "objective.cls_token, sep_token")
            return SegmentPairs(masker, objective, cls_token, sep_token, read_windows)
        case PermutationConfig():
            return PermutationSampler(objective, tokenizer.eos_id, key)
        case SpanCorruptionConfig():
            _, spans = objective.count_noise(config.batch.sequence_length)
            names = [objective.sentinel_token.replace("{}", str(span)) for span in range(spans)]
            sentinels = _find_tokens(tokenizer, names, "objective.sentinel_token")
            return SpanCorruptor(
                objective, tuple(sentinels), tokenizer.eos_id, get_start_token(config), key
            )
        case unreachable:
            assert_never(unreachable)


def build_middle_filler(
    config: RunConfig, shards: TokenShards, tokenizer: Tokenizer
) -> MiddleFiller | None:
    """Build what rearranges documents for fill-in-the-middle.

    Args:
        config: the config of the run.
        shards: the training split of one source.
        tokenizer: the tokenizer that has the marks.

    Returns:
        The rearrangement; None where none is asked for.

    Raises:
        ConfigError: the tokenizer lacks a mark, or the source has chats.
    """
    settings = config.batch.fill_in_middle
    if settings is None:
        return None
    if shards.manifest.answers:
        raise ConfigError(
            "batch.fill_in_middle would move answers away from their questions in the chats of "
            f"{shards.folder}. Set it to null, or train on chats in a separate run."
        )
    names = [settings.prefix_token, settings.middle_token, settings.suffix_token]
    tokens = _find_tokens(
        tokenizer, names, "batch.fill_in_middle.prefix_token, middle_token, suffix_token"
    )
    if len(set(tokens)) < len(tokens):
        raise ConfigError(
            f"batch.fill_in_middle has equal tokens: {', '.join(names)}. Use three different ones."
        )
    return MiddleFiller(settings, MiddleTokens(*tokens), (shards.fingerprint, config.run.seed))


def get_start_token(config: RunConfig) -> int:
    """Return the token that starts every target of an encoder-decoder.

    Args:
        config: the config of the run.

    Returns:
        `model.encoder.decoder_start_token_id`; 0 where the model has no encoder section.
    """
    return 0 if config.model.encoder is None else config.model.encoder.decoder_start_token_id


def _find_tokens(tokenizer: Tokenizer, names: list[str], field: str) -> list[int]:
    found = [tokenizer.find_piece_id(name) for name in names]
    if None in found:
        missing = names[found.index(None)]
        raise ConfigError(
            f"{field}={missing} is not a token of the tokenizer. Train a tokenizer with it: set "
            f"tokenizer.control_symbols=[{', '.join(names)}] and run llmsys prepare CONFIG. "
            f"For an existing tokenizer, set {field} to its own name, such as [MASK]."
        )
    return [number for number in found if number is not None]
