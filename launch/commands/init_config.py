"""Format the config that `llmsys init` writes, with a comment for every choice, and the commands
that follow.

Sizes follow from the bytes of the files: a small crawl has a small vocabulary and holds back a
larger share.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from llmsys.launch.commands.init_inputs import FoundContents
from llmsys.launch.commands.init_minutes import SizedRun
from llmsys.launch.commands.init_sized_config import iter_sized_lines

# Bytes of kept text per byte of a compressed crawl file where none could be measured: low, so that
# a vocabulary is rather too small.
HTML_TEXT_SHARE = 0.1
# Bytes of text from which a vocabulary of a size can be trained.
VOCABULARIES = ((1e9, 32_000), (3e6, 8_192), (3e5, 4_096), (3e4, 1_024), (0, 512))
# Bytes of a token by vocabulary, between what was measured on English web text (4.6, 4.1, 3.6, 2.4
# and 1.7) and on crawls of all languages (3.4 to 3.7 with 8,192 pieces).
TOKEN_BYTES = {32_000: 4.3, 8_192: 3.8, 4_096: 3.3, 1_024: 2.2, 512: 1.6}
# Of the vocabularies of published models, which are larger.
MODEL_TOKEN_BYTES = 4.3
SMALL_DATA_BYTES = 1e8
# Each document is held out with this probability; of few documents with a larger one, so that there
# are some. A folder with fewer than MIN_DOCUMENTS may well end up without.
HELDOUT_SHARE, MAX_HELDOUT_SHARE, HELDOUT_DOCUMENTS = 0.05, 0.3, 4
MIN_DOCUMENTS, MANY_DOCUMENTS = 10, 1_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def format_config(found: FoundContents, output: Path, sized: SizedRun | None = None) -> str:
    """Return the YAML of a run.

    Args:
        found: what the folders hold.
        output: file that will be written; bases are relative to it, other paths to the working
            directory.
        sized: model and budget by `--minutes`; None: those of a first run.

    Returns:
        The text of a config file.
    """
    lines = [
        "# Written by llmsys init. Every other key has its default: llmsys show " + output.name
    ]
    if found.dataset is not None:
        lines += [
            "",
            f"base: {_format_base(found.dataset, output)}   # the dataset, with its rules and "
            "tokenizer",
        ]
    name = _get_name(found)
    lines += ["", f"run: {{name: {name}, folder: runs/{name}}}   # everything that training writes"]
    if found.dataset is None:
        vocabulary = None if sized is None else sized.vocabulary
        lines += ["", *_iter_data_lines(found, name), "", *_iter_tokenizer_lines(found, vocabulary)]
    if sized is not None:
        return "\n".join([*lines, "", *iter_sized_lines(sized)]) + "\n"
    lines += ["", *_iter_model_lines(found, output), "", *_iter_training_lines(found, name)]
    return "\n".join(lines) + "\n"


def list_next_commands(found: FoundContents, output: Path) -> list[list[str]]:
    """Return the commands from this config to a trained model, as words."""
    config, name = str(output), _get_name(found)
    train = ["llmsys", "train", config, "--prepare"]
    if found.model is None:
        return [
            train,
            ["llmsys", "generate", config, "--prompt", "The"],
            ["llmsys", "report", config],
        ]
    if not found.patterns and found.dataset is None:
        train += ["data.inputs=[texts/*.jsonl]"]
    weights = _get_weights_folder(name)
    return [
        ["llmsys", "convert", str(found.model), weights],
        train,
        ["llmsys", "convert", f"runs/{name}", f"runs/{name}-exported"],
    ]


def _get_name(found: FoundContents) -> str:
    """Return a name from the folder of the model, the dataset or the files, of letters that need
    no quotes.
    """
    folder = found.model or found.dataset or Path(found.patterns[0].partition("*")[0])
    name = "".join(
        letter if letter.isalnum() or letter in "._-" else "-" for letter in folder.resolve().name
    )
    return f"{name.strip('._-') or 'run'}-run" if found.dataset else name.strip("._-") or "run"


def _get_weights_folder(name: str) -> str:
    return f"runs/{name}-weights"


def _format_base(folder: Path, output: Path) -> str:
    return _quote(
        str(folder) if folder.is_absolute() else os.path.relpath(folder, output.absolute().parent)
    )


def _quote(text: str) -> str:
    """Return text as YAML, in quotes where a character of it may mean something."""
    is_plain = all(letter.isalnum() or letter in "/_.-" for letter in text) and text[:1].isalpha()
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def estimate_text_bytes(found: FoundContents) -> float:
    """Return the bytes of text after preparation, by the sample where there is one.

    Args:
        found: what the folders hold.
    """
    share = HTML_TEXT_SHARE if found.has_html else 1.0
    return found.num_bytes * (share if found.text_share is None else found.text_share)


def _estimate_tokens(found: FoundContents) -> float:
    size = MODEL_TOKEN_BYTES if found.model else TOKEN_BYTES[_choose_vocabulary(found)]
    return estimate_text_bytes(found) / size


def _choose_vocabulary(found: FoundContents) -> int:
    # Half, because a sample does not show how much of the text is there twice.
    text_bytes = estimate_text_bytes(found) / (1 if found.text_share is None else 2)
    return next(size for least, size in VOCABULARIES if text_bytes >= least)


def _iter_data_lines(found: FoundContents, name: str) -> Iterator[str]:
    yield "data:"
    yield f"  name: {name}"
    yield (
        f"  folder: runs/{name}-data          # the prepared dataset: documents, dropped "
        "documents, token shards"
    )
    if found.patterns:
        yield "  inputs:"
        yield from (f"    - {_quote(pattern)}" for pattern in found.patterns)
    else:
        yield (
            "  inputs: []                       # name your files: WARC, parquet, jsonl, Arrow, "
            "CSV or text"
        )
    if found.text_field not in ("", "text"):
        others = (
            f"; others with text: {', '.join(found.other_fields)}" if found.other_fields else ""
        )
        yield (
            f"  read: {{text_field: {_quote(found.text_field)}}}   # the column of the "
            f"documents{others}"
        )
    if found.has_crawl:
        yield (
            "  language: {languages: []}        # every language that is recognized; [en] keeps "
            "English alone"
        )
        yield (
            "  rules:                           # FineWeb's, in its order; llmsys list rules has "
            "the others"
        )
        yield "    - kind: gopher_repetition"
        yield "    - kind: gopher_quality"
        yield "    - kind: c4_datatrove"
        yield "      end_marks: []                # keep lines that end without a full stop"
    else:
        yield (
            "  language: {languages: [], min_score: 0}   # every language; [en] keeps English alone"
        )
        yield (
            "  # rules: [{kind: gopher_quality}]   # all are kept; llmsys list rules has the rules"
        )
    yield "  deduplicate:"
    yield "    exact: {kind: text}            # of equal texts one stays"
    yield "    minhash: {kind: minhash}       # and of near duplicates the longest"
    if estimate_text_bytes(found) < SMALL_DATA_BYTES:
        yield (
            f"  split: {{heldout_fraction: {choose_heldout_share(found):.2g}}}  # of little text, "
            "a share that is large enough to measure on"
        )


def choose_heldout_share(found: FoundContents) -> float:
    """Return the share of documents to hold out of little text: some, also of few documents.

    Args:
        found: what the folders hold.
    """
    documents = found.num_documents or MANY_DOCUMENTS
    return max(HELDOUT_SHARE, min(MAX_HELDOUT_SHARE, HELDOUT_DOCUMENTS / documents))


def _iter_tokenizer_lines(found: FoundContents, vocabulary: int | None) -> Iterator[str]:
    if found.model is not None and any((found.model / name).is_file() for name in TOKENIZER_FILES):
        yield f"tokenizer: {{kind: file, path: {_quote(str(found.model))}}}   # the model's own"
        return
    size = vocabulary or _choose_vocabulary(found)
    yield f"tokenizer: {{kind: sentencepiece, vocab_size: {size}}}   # trained on the kept text"


def _iter_model_lines(found: FoundContents, output: Path) -> Iterator[str]:
    if found.model is not None:
        yield f"model: {{base: {_format_base(found.model, output)}}}"
        return
    if found.dataset is not None:
        from llmsys.dataset.manifest import load_manifest

        vocabulary = load_manifest(found.dataset).vocab_size or _choose_vocabulary(found)
    else:
        vocabulary = _choose_vocabulary(found)
    yield (
        "model:                             # a small decoder; or base: model/NAME, see llmsys "
        "list models"
    )
    yield f"  vocab_size: {vocabulary}"
    yield "  hidden_size: 256"
    yield "  intermediate_size: 704"
    yield "  num_hidden_layers: 4"
    yield "  num_attention_heads: 4"
    yield "  num_key_value_heads: 2"


def _iter_training_lines(found: FoundContents, name: str) -> Iterator[str]:
    length, tokens = 512, 1_000_000
    if found.model is not None:
        from llmsys.config.loading.load import load_model_config

        length = min(length, load_model_config(str(found.model)).max_position_embeddings)
    yield f"batch: {{sequence_length: {length}, sequences: 8}}   # {8 * length:,} tokens a step"
    rate = "1e-5" if found.model is not None else "1e-3"
    yield f"optimizer: {{kind: adamw, learning_rate: {rate}}}"
    yield f"schedule: {{kind: cosine, warmup_tokens: {tokens // 20}}}"
    yield "train:"
    if found.num_bytes:
        how = "very roughly" if found.text_share is None else "by a sample about"
        yield (
            f"  tokens: {tokens}                  # one pass over this text: {how} "
            f"{_estimate_tokens(found):,.0f}"
        )
    else:
        yield f"  tokens: {tokens}"
    if found.model is not None:
        yield f"  init_from: {_get_weights_folder(name)}   # what llmsys convert writes"
    yield "checkpoint: {every_steps: 50}"
    yield "# launch: {processes: 2}           # 0: one for each accelerator"
