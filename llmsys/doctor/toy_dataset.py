"""Write a small prepared dataset of a toy language within a second, with a config that trains on
it.
"""

import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import sentencepiece
import xxhash

from llmsys.config.patches import BYTE_VALUES
from llmsys.config.run import RunConfig
from llmsys.dataset import token_shards
from llmsys.dataset.manifest import Histogram, Manifest, ReadSummary
from llmsys.vocabulary.chat_tokens import join_chat_tokens
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer

WORDS = (
    "the cat dog tree house runs sees green old river and of to with it was small bright stone "
    "walks"
)
VOCABULARY, LENGTH, SEQUENCES, STEPS = 384, 32, 8, 12


def build_toy_config(folder: Path, **changes: Any) -> RunConfig:
    """Return a run of twelve steps in bitwise mode with experts, equal on every number of
    processes.
    """
    settings: dict[str, Any] = {
        "run": {"name": "drill", "folder": folder / "run"},
        "data": {"kind": "crawl", "folder": folder / "data"},
        "tokenizer": {"kind": "sentencepiece", "vocab_size": VOCABULARY},
        "model": {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": LENGTH,
            "moe": {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "num_shared_experts": 1,
            },
        },
        "batch": {"sequence_length": LENGTH, "sequences": SEQUENCES, "micro_sequences": 2},
        "train": {
            "tokens": STEPS * SEQUENCES * LENGTH,
            "precision": "fp32",
            "log_every_steps": 1,
            "reproducibility": "bitwise",
            "threads_per_process": 1,
            # short, because the drill of a stalled rank waits for it
            "hang_timeout_seconds": 8,
        },
        "checkpoint": {"every_steps": 2, "keep_last": 3},
        "evaluation": {"every_steps": 4, "max_tokens": 64},
    }
    merged = {
        name: settings.get(name, {}) | changes.get(name, {})
        for name in settings.keys() | changes.keys()
    }
    return RunConfig.model_validate(merged)


def write_toy_dataset(
    folder: Path,
    documents: int = 120,
    heldout: int = 6,
    symbols: tuple[str, ...] = (),
    seed: int = 2,
) -> None:
    """Write tokenizer, token shards and manifest as `llmsys prepare` does.

    Args:
        folder: The dataset folder, which is made.
        documents: Training documents.
        heldout: Held-out documents.
        symbols: Pieces of the tokenizer that no text produces.
        seed: Seed of the training documents; that of held-out ones is the next.
    """
    tokenizer = _write_tokenizer(folder, symbols)
    heldout_texts = _generate_texts(heldout, seed=seed + 1)
    splits = {
        "train": _write_texts(folder, "train", _generate_texts(documents, seed=seed), tokenizer),
        "heldout": _write_texts(folder, "heldout", heldout_texts, tokenizer),
    }
    _write_manifest(folder, splits, tokenizer)


def write_toy_pairs(
    folder: Path, labels: tuple[str, ...] = (), pairs: int = 160, heldout: int = 12
) -> None:
    """Write pairs of short texts as `llmsys prepare` does.

    Args:
        folder: the dataset folder, which is made.
        labels: if given, texts have one of these labels each instead of a target.
        pairs: training pairs.
        heldout: held-out pairs.
    """
    tokenizer = _write_tokenizer(folder, ())
    splits = {}
    for split, count, seed in (("train", pairs, 4), ("heldout", heldout, 5)):
        sources = _generate_texts(count, seed=seed, words=(1, 5))
        splits[f"{split}_source"] = _write_texts(folder, f"{split}_source", sources, tokenizer)
        if labels:
            rows = [[number % len(labels)] for number in range(count)]
            splits[split] = _write_split(folder, split, rows, sources)
        else:
            targets = [" ".join(reversed(text.split())) for text in sources]
            splits[split] = _write_texts(folder, split, targets, tokenizer)
    _write_manifest(folder, splits, tokenizer, labels=labels)


def write_toy_chats(folder: Path, chats: int = 90, heldout: int = 6) -> None:
    """Write chats of questions and answers as `llmsys prepare` does.

    Args:
        folder: the dataset folder, which is made.
        chats: training chats.
        heldout: held-out chats.
    """
    tokenizer = _write_tokenizer(folder, ())
    splits = {}
    answers = {}
    for split, count, seed in (("train", chats, 8), ("heldout", heldout, 9)):
        choose = random.Random(seed)
        texts = _generate_texts(count, seed=seed)
        rows = []
        answers[split] = 0
        for text in texts:
            ids = tokenizer.encode(text)
            # Turns of one to six tokens; the first is a question.
            is_answer: list[bool] = []
            is_turn_of_assistant = False
            while len(is_answer) < len(ids):
                is_answer += [is_turn_of_assistant] * choose.randrange(1, 7)
                is_turn_of_assistant = not is_turn_of_assistant
            row = join_chat_tokens(ids, is_answer[: len(ids)], tokenizer.vocab_size)
            answers[split] += int((row < tokenizer.vocab_size).sum())
            rows.append(row.tolist())
        splits[split] = _write_split(folder, split, rows, texts)
    _write_manifest(folder, splits, tokenizer, answers=answers)


def write_toy_images(
    folder: Path, image_size: int, labels: tuple[str, ...], images: int = 96, heldout: int = 12
) -> None:
    """Write grey images with labels as `llmsys prepare` does.

    Args:
        folder: the dataset folder, which is made.
        image_size: height and width, in pixels.
        labels: names of the labels; an image of a later one is brighter.
        images: training images.
        heldout: held-out images.
    """
    (folder / "tokens").mkdir(parents=True)
    splits = {}
    for split, count, seed in (("train", images, 10), ("heldout", heldout, 11)):
        choose = random.Random(seed)
        numbers = [number % len(labels) for number in range(count)]
        pixels = [
            [choose.randrange(64 * number, 64 * number + 128) for _ in range(image_size**2)]
            for number in numbers
        ]
        names = [f"{split} {number}" for number in range(count)]
        splits[f"{split}_source"] = _write_split(folder, f"{split}_source", pixels, names)
        splits[split] = _write_split(folder, split, [[number] for number in numbers], names)
    _write_manifest(folder, splits, None, labels=labels)


def _write_tokenizer(folder: Path, symbols: tuple[str, ...]) -> Tokenizer:
    """Train and write the tokenizer of a new dataset folder, with an empty folder of tokens
    beside it.
    """
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokens").mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_generate_texts(200, seed=1)),
        model_writer=model,
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        # The toy text has too few pieces for a hard limit.
        hard_vocab_limit=False,
        minloglevel=2,
        control_symbols=list(symbols),
    )
    (folder / "tokenizer" / "tokenizer.model").write_bytes(model.getvalue())
    return load_tokenizer(folder / "tokenizer" / "tokenizer.model")


def _write_manifest(
    folder: Path,
    splits: dict[str, token_shards.Split],
    tokenizer: Tokenizer | None,
    labels: tuple[str, ...] = (),
    answers: dict[str, int] | None = None,
) -> None:
    identity = tokenizer.fingerprint if tokenizer else None
    digests = [file.digest for file in token_shards.iter_token_files(folder, splits.values())]
    manifest = Manifest(
        name="toy",
        fingerprint=token_shards.compute_dataset_fingerprint(identity, digests),
        config={},
        config_digest="",
        vocab_size=tokenizer.vocab_size if tokenizer else BYTE_VALUES,
        token_dtype="uint16",
        tokenizer_fingerprint=identity,
        splits=splits,
        documents=token_shards.DocumentFiles(),
        dropped=token_shards.DocumentFiles(),
        funnel=(),
        languages={},
        lengths=Histogram(edges=(0, 1), counts=(0,)),
        read=ReadSummary(files=0, records=0, html_bytes=0),
        labels=labels,
        answers=answers or {},
    )
    token_shards.write_manifest(folder, manifest)


def build_toy_url(split: str, number: int) -> str:
    """Return the URL of document `number` of a split."""
    return f"http://toy.example/{split}/{number}"


def _generate_texts(count: int, seed: int, words: tuple[int, int] = (10, 60)) -> list[str]:
    """Return sentences of a toy language, the same for the same seed; `words` limits their
    number of words.
    """
    choose = random.Random(seed)
    return [
        " ".join(choose.choices(WORDS.split(), k=choose.randrange(*words))) + "."
        for _ in range(count)
    ]


def _write_texts(
    folder: Path, split: str, documents: list[str], tokenizer: Tokenizer
) -> token_shards.Split:
    rows = [[*tokenizer.encode(text), tokenizer.eos_id] for text in documents]
    return _write_split(folder, split, rows, documents)


def _write_split(
    folder: Path, split: str, rows: list[list[int]], documents: list[str]
) -> token_shards.Split:
    path = folder / "tokens" / f"{split}-00000.arrow"
    schema = token_shards.build_token_schema("uint16")
    urls = [build_toy_url(split, number) for number in range(len(documents))]
    with token_shards.ArrowFileWriter(path, schema) as writer:
        columns = {
            "tokens": rows,
            "id": [f"{number:032x}" for number in range(len(documents))],
            "file": ["toy.warc.gz"] * len(documents),
            "offset": list(range(len(documents))),
            "url_hash": [xxhash.xxh64_intdigest(url.encode()) for url in urls],
            "text_bytes": [len(text.encode()) for text in documents],
        }
        writer.write(pa.record_batch(columns, schema=schema))
    file = token_shards.write_page_table(path)
    sums = {"documents": file.rows, "tokens": file.tokens, "bytes": file.text_bytes}
    index = folder / "tokens" / f"{split}.index"
    token_shards.write_token_index(index, [file])
    digest = token_shards.compute_file_digest(index)
    return token_shards.Split(
        **sums, index=token_shards.TokenIndex(name=index.name, files=1, digest=digest)
    )
