"""Lines translated with a trained model, and their score against references.

Texts in and texts out; BLEU is sacrebleu's, on cased, detokenized text, and its signature says how it was computed.
"""

from collections.abc import Sequence
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, DataError
from llmsys.generate.sample import BeamSearchParams
from llmsys.generate.translate import translate_sequences
from llmsys.manifest import load_manifest
from llmsys.model.transformer import Transformer
from llmsys.shards import read_batches
from llmsys.tokenizer import Tokenizer
from llmsys.train.objective import get_start_token


def translate_lines(model: Transformer, tokenizer: Tokenizer, config: RunConfig, lines: Sequence[str]) -> list[str]:
    """The translation of each line, by beam search as `generation.beams` and `length_penalty` say; "" of an empty one.

    Raises ConfigError when the model is no encoder-decoder, DataError when a line is longer than its positions.
    """
    if config.model.family != "encoder_decoder":
        raise ConfigError(f"A model with family={config.model.family} does not translate. Use llmsys generate.")
    sources = [[*tokenizer.encode(line), tokenizer.eos_id] for line in lines]
    limit = config.model.max_position_embeddings
    for number, source in enumerate(sources, start=1):
        if len(source) > limit:
            raise DataError(
                f"line {number} has {len(source)} tokens, more than model.max_position_embeddings={limit}. Shorten it."
            )
    asked = [place for place, source in enumerate(sources) if len(source) > 1]
    found = translate_sequences(
        model,
        [sources[place] for place in asked],
        how=BeamSearchParams(config.generation.beams, config.generation.length_penalty),
        start_token=get_start_token(config),
        end_token=tokenizer.eos_id,
        pieces=tokenizer.vocab_size,
    )
    texts = [""] * len(lines)
    for place, tokens in zip(asked, found, strict=True):
        texts[place] = tokenizer.decode(tokens)
    return texts


def read_heldout_texts(config: RunConfig) -> tuple[list[str], list[str]]:
    """Sources and references of the held-out pairs as they were given, in their order."""
    folder = config.data.folder
    sources: list[str] = []
    references: list[str] = []
    for file in load_manifest(folder).documents.files:
        if file.name.startswith("heldout-"):
            for batch in read_batches(folder / "documents" / file.name):
                sources += batch.column("source").to_pylist()
                references += batch.column("target").to_pylist()
    return sources, references


def compute_bleu(translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Corpus BLEU of translations against one reference each, with brevity penalty, length ratio and signature."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)])
    return {
        "bleu": score.score,
        "brevity_penalty": score.bp,
        "length_ratio": score.ratio,
        "sentences": len(references),
        "signature": str(metric.get_signature()),
    }
