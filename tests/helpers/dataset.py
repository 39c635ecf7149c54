"""A small tokenized dataset, made in a second: what `prepare` would leave, for tests of training."""

import io
import random
from pathlib import Path

import pyarrow as pa
import sentencepiece
import xxhash

from llmsys import shards
from llmsys.manifest import Histogram, Manifest, ReadSummary
from llmsys.tokenizer import load_tokenizer

WORDS = "the cat dog tree house runs sees green old river and of to with it was small bright stone walks"
VOCABULARY = 384


def texts(count: int, seed: int) -> list[str]:
    """Sentences of a toy language, the same for the same seed."""
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS.split(), k=choose.randrange(10, 60))) + "." for _ in range(count)]


def toy_url(split: str, number: int) -> str:
    """Where document `number` of a split came from."""
    return f"http://toy.example/{split}/{number}"


def make_dataset(folder: Path, documents: int = 120, heldout: int = 12, symbols: tuple[str, ...] = ()) -> Path:
    """Write tokenizer, token shards and manifest; the folder is ready for training."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokens").mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(200, seed=1)), model_writer=model, vocab_size=VOCABULARY, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2, control_symbols=list(symbols),
    )  # fmt: skip
    (folder / "tokenizer" / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(folder / "tokenizer" / "tokenizer.model")
    splits = {
        "train": _write(folder, "train", texts(documents, seed=2), tokenizer),
        "heldout": _write(folder, "heldout", texts(heldout, seed=3), tokenizer),
    }
    digests = [file.digest for split in splits.values() for file in split.files]
    manifest = Manifest(
        name="toy", fingerprint=shards.dataset_fingerprint(tokenizer.fingerprint, digests), config={}, config_digest="",
        vocab_size=tokenizer.vocab_size, token_dtype="uint16", tokenizer_fingerprint=tokenizer.fingerprint,
        splits=splits, documents=shards.DocumentFiles(), dropped=shards.DocumentFiles(), funnel=(), languages={},
        lengths=Histogram(edges=(0, 1), counts=(0,)), read=ReadSummary(files=0, records=0, html_bytes=0),
    )  # fmt: skip
    shards.write_manifest(folder, manifest)
    return folder


def _write(folder: Path, split: str, documents: list[str], tokenizer: object) -> shards.Split:
    path = folder / "tokens" / f"{split}-00000.arrow"
    schema = shards.token_schema("uint16")
    with shards.ShardWriter(path, schema) as writer:
        columns = {
            "tokens": [[*tokenizer.encode(text), tokenizer.eos_id] for text in documents],  # type: ignore[attr-defined]
            "id": [f"{number:032x}" for number in range(len(documents))],
            "file": ["toy.warc.gz"] * len(documents),
            "offset": list(range(len(documents))),
            "url_hash": [xxhash.xxh64_intdigest(toy_url(split, number).encode()) for number in range(len(documents))],
            "text_bytes": [len(text.encode()) for text in documents],
        }
        writer.write(pa.record_batch(columns, schema=schema))
    file = shards.describe_token_file(path)
    return shards.Split(documents=file.rows, tokens=file.tokens, bytes=file.text_bytes, files=(file,))
