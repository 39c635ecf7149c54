"""Laws of tokenization: no text is lost, the order follows from ids alone, files follow from
tokens alone.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmsys.config.data import CrawlConfig, HeldoutSplitConfig
from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.data_pipeline.core.document_schema import (
    build_document_schema,
    hash_positions,
    is_heldout,
)
from llmsys.data_pipeline.tokenize.encode_documents import encode_file
from llmsys.data_pipeline.tokenize.shuffle_documents import (
    SPLITS,
    TokenFilePlan,
    plan_files,
    write_token_file,
)
from llmsys.data_pipeline.tokenize.train_sentencepiece import train_document_tokenizer
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tiny_crawl import write_sentences

Rows = list[dict[str, Any]]
CONFIG = SentencePieceConfig(vocab_size=400)
DATA = CrawlConfig(split=HeldoutSplitConfig(heldout_fraction=0.2))
NONE_HELD = HeldoutSplitConfig(heldout_fraction=0)


def silent(amount: float, dropped: int) -> None:
    pass


def documents(count: int, seed: int = 0) -> Rows:
    choose = random.Random(seed)
    texts = ["\n".join(write_sentences(choose, choose.randrange(1, 9))) for _ in range(count)]
    texts[0] = "  spaces,\ttabs and\n\n\nblank lines "
    texts[1] = "猫 and 🦊, unseen in training"
    return [
        {
            "id": f"{choose.getrandbits(128):032x}",
            "url": f"https://x.org/{i}",
            "file": "a.gz",
            "offset": i,
            "text": text,
        }
        for i, text in enumerate(texts)
    ]


def write_documents(path: Path, rows: Rows, batch_rows: int = 9) -> Path:
    with ArrowFileWriter(path, build_document_schema([]), "zstd") as writer:
        for start in range(0, len(rows), batch_rows):
            writer.write(
                pa.RecordBatch.from_pylist(
                    rows[start : start + batch_rows], build_document_schema([])
                )
            )
    return path


@pytest.fixture(scope="module")
def rows() -> Rows:
    return documents(60)


@pytest.fixture(scope="module")
def model(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    source = write_documents(folder / "documents.arrow", rows)
    train_document_tokenizer(
        silent, sources=[source], folder=folder, config=CONFIG, split=DATA.split
    )
    return folder / "tokenizer.model"


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def make_tokens(
    folder: Path, parts: list[Rows], tokenizer: Tokenizer, model: Path, **tokens: int
) -> list[Path]:
    """Encode documents that lie in some parts, and lay the tokens out; gives the token files."""
    encoded = []
    for number, part in enumerate(parts):
        source = write_documents(folder / f"documents-{number}.arrow", part)
        encoded.append(folder / f"encoded-{number}.arrow")
        fingerprint = tokenizer.fingerprint
        pieces = folder / f"pieces-{number}.arrow"
        common: dict[str, Any] = {"model": model, "fingerprint": fingerprint, "config": DATA}
        encode_file(silent, source=source, output=encoded[-1], pieces=pieces, **common)
    files = []
    for split in SPLITS:
        for plan in plan_files(encoded, split, tokens["shard_tokens"]):
            files.append(folder / plan.name)
            write_token_file(
                silent,
                plan=plan,
                sources=encoded,
                output=files[-1],
                vocab_size=400,
                batch_tokens=tokens["batch_tokens"],
            )
    return files


def read(files: list[Path]) -> Rows:
    return [row for path in files for batch in read_batches(path) for row in batch.to_pylist()]


def test_every_document_is_there_once_whole_and_ends_with_eos(
    rows: Rows, tokenizer: Tokenizer, model: Path, tmp_path: Path
) -> None:
    files = make_tokens(
        tmp_path, [rows[:25], rows[25:]], tokenizer, model, shard_tokens=3_000, batch_tokens=700
    )
    texts = {row["id"]: row for row in rows}
    found = read(files)
    assert sorted(row["id"] for row in found) == sorted(texts)
    for row in found:
        *tokens, last = row["tokens"]
        assert last == tokenizer.eos_id
        assert tokens == tokenizer.encode(texts[row["id"]]["text"])
        assert tokenizer.decode(tokens) == texts[row["id"]]["text"]
        assert row["text_bytes"] == len(texts[row["id"]]["text"].encode())
        assert (row["file"], row["offset"]) == ("a.gz", texts[row["id"]]["offset"])


def test_held_back_documents_are_in_no_training_file(
    rows: Rows, tokenizer: Tokenizer, model: Path, tmp_path: Path
) -> None:
    files = make_tokens(tmp_path, [rows], tokenizer, model, shard_tokens=3_000, batch_tokens=700)
    held = {row["id"] for row in read([path for path in files if path.name.startswith("heldout")])}
    ids = [row["id"] for row in rows]
    assert held == {name for name, flag in zip(ids, is_heldout(ids, 0.2, 0), strict=True) if flag}
    assert 0 < len(held) < len(ids)


def test_token_files_do_not_depend_on_where_the_documents_lay(
    rows: Rows, tokenizer: Tokenizer, model: Path, tmp_path: Path
) -> None:
    shuffled = random.Random(1).sample(rows, len(rows))
    layouts = [[rows], [shuffled[:7], shuffled[7:50], shuffled[50:]]]
    results = []
    for number, parts in enumerate(layouts):
        folder = tmp_path / str(number)
        files = make_tokens(folder, parts, tokenizer, model, shard_tokens=3_000, batch_tokens=700)
        results.append({path.name: path.read_bytes() for path in files})
    assert results[0] == results[1]


def test_cutting_files_keeps_the_order_and_about_the_size(
    rows: Rows, tokenizer: Tokenizer, model: Path, tmp_path: Path
) -> None:
    one = make_tokens(
        tmp_path / "one", [rows], tokenizer, model, shard_tokens=10**9, batch_tokens=10**9
    )
    many = make_tokens(
        tmp_path / "many", [rows], tokenizer, model, shard_tokens=1_500, batch_tokens=300
    )
    assert [path.name for path in one] == ["train-00000.arrow", "heldout-00000.arrow"]
    assert len(many) > 5
    assert read(many) == read(one)
    longest = max(len(row["tokens"]) for row in read(one))
    for path in many:
        assert 0 < sum(len(row["tokens"]) for row in read([path])) <= 1_500 + longest
        batches = [
            sum(map(len, batch.column("tokens").to_pylist())) for batch in read_batches(path)
        ]
        assert all(300 <= tokens < 300 + longest for tokens in batches[:-1])


def test_the_shuffle_is_over_all_documents_and_follows_the_seed(rows: Rows) -> None:
    ids = [row["id"] for row in rows]
    first, other = (
        np.argsort(hash_positions(ids, "shuffle", 0)),
        np.argsort(hash_positions(ids, "shuffle", 1)),
    )
    assert sorted(first.tolist()) == list(range(len(ids)))
    assert (first != other).any()
    assert (first != np.argsort(hash_positions(ids, "heldout", 0))).any()


def test_a_larger_share_holds_back_more_of_the_same_documents() -> None:
    ids = [f"{number:032x}" for number in range(4_000)]
    small, large = is_heldout(ids, 0.05, 0), is_heldout(ids, 0.10, 0)
    assert not (small & ~large).any()
    assert abs(large.mean() - 0.10) < 0.02
    assert not is_heldout(ids, 0, 0).any()
    assert (large & is_heldout(ids, 0.10, 1)).mean() < 0.03  # another seed holds back others


def test_a_split_without_documents_has_no_files(tmp_path: Path) -> None:
    assert plan_files([], "train", 100) == []
    assert TokenFilePlan("heldout", 3, 0, 1, 5).name == "heldout-00003.arrow"


def test_training_twice_gives_the_same_bytes(rows: Rows, model: Path, tmp_path: Path) -> None:
    source = write_documents(tmp_path / "documents.arrow", rows, batch_rows=4)
    train_document_tokenizer(
        silent, sources=[source], folder=tmp_path, config=CONFIG, split=DATA.split
    )
    for name in ("tokenizer.model", "tokenizer.vocab", "made.json"):
        assert (tmp_path / name).read_bytes() == (model.parent / name).read_bytes()
    pieces = (tmp_path / "tokenizer.vocab").read_text().splitlines()
    assert len(pieces) == 400


def test_the_sample_is_the_smallest_hashes_and_never_held_back(rows: Rows, tmp_path: Path) -> None:
    ids = [row["id"] for row in rows]
    train = [row for row, held in zip(rows, is_heldout(ids, 0.2, 0), strict=True) if not held]
    order = np.argsort(hash_positions([row["id"] for row in train], "tokenizer", 0))
    sampled = [train[i] for i in order.tolist()][:20]
    size = sum(len(row["text"].encode()) for row in sampled)
    everything, chosen = tmp_path / "all", tmp_path / "chosen"
    config = CONFIG.model_copy(update={"sample_bytes": size, "vocab_size": 320})
    in_file_order = [row for row in rows if row in sampled]
    for folder, part, split in ((everything, rows, DATA.split), (chosen, in_file_order, NONE_HELD)):
        source = write_documents(folder / "documents.arrow", part)
        train_document_tokenizer(
            silent, sources=[source], folder=folder, config=config, split=split
        )
    facts = json.loads((everything / "made.json").read_text())
    assert facts["sample"] == {"documents": 20, "bytes": size}
    assert (everything / "tokenizer.model").read_bytes() == (
        chosen / "tokenizer.model"
    ).read_bytes()


def test_nothing_to_train_on_is_one_message(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "documents.arrow", [])
    with pytest.raises(
        DataError, match=r"is left to train a tokenizer on\. Lower data\.split\.heldout_fraction"
    ):
        train_document_tokenizer(
            silent, sources=[source], folder=tmp_path, config=CONFIG, split=DATA.split
        )
