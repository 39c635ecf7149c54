"""Laws of `llmsys inspect`: a whole dataset has status 0, and whatever is changed in one is
named, with status 1.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmsys.data_pipeline.inspection.format_result import format_inspection
from llmsys.data_pipeline.inspection.token_samples import verify_samples
from llmsys.data_pipeline.inspection.verify_dataset import InspectionResult, verify_dataset
from llmsys.data_pipeline.inspection.verify_files import (
    DatasetFinding,
    format_findings,
    verify_token_file,
)
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import (
    Manifest,
    compute_dataset_fingerprint,
    load_manifest,
    write_manifest,
)
from llmsys.dataset.token_shards import (
    ArrowFileWriter,
    TokenFile,
    compute_file_digest,
    describe_token_file,
    iter_token_files,
    open_tokens,
    read_batches,
    write_token_index,
)
from llmsys.errors import DataError
from llmsys.launch.main import main
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    prepare_dataset(build_tiny_config(folder / "data", make_crawl(folder / "crawl", files=1)))
    return folder / "data"


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["inspect", str(folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_whole_dataset_is_recounted_hashed_and_decoded(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = said(made, capsys)
    manifest = load_manifest(made)
    assert (status, found["whole"], found["findings"]) == (0, True, [])
    assert found["splits"]["train"]["tokens"] == manifest.splits["train"].tokens
    documents = [
        row
        for entry in manifest.documents.files
        for row in rows_of(made / "documents" / entry.name)
    ]
    texts = {row["id"]: row["text"] for row in documents}
    assert {sample["id"] for sample in found["samples"]} == set(texts)
    assert all(
        sample["text"] == texts[sample["id"]] and sample["same_text"] for sample in found["samples"]
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for batch in read_batches(path) for row in batch.to_pylist()]


def test_people_get_counts_the_tokenizers_fit_and_samples(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(made), "--samples", "2"]) == 0
    text = capsys.readouterr().out
    assert "everything matches the manifest (fingerprint" in text
    assert "bytes/token" in text
    assert "pieces occur in no document" in text
    assert "2 documents encoded again with equal ids, and decoded; 2 decode to their text:" in text


def test_a_text_that_the_tokenizer_changes_is_no_damage(dataset: Path) -> None:
    """U+2581 is how SentencePiece writes a space, and comes back as one: the ids are the text's
    all the same.
    """
    manifest, tokenizer = load_manifest(dataset), load_tokenizer(dataset / "tokenizer")
    name = manifest.documents.files[0].name
    (batch, *_) = read_batches(dataset / "documents" / name)
    texts = [text.replace(" ", "\u2581", 1) for text in batch.column("text").to_pylist()]
    changed = batch.set_column(
        batch.schema.get_field_index("text"), "text", pa.array(texts, pa.large_string())
    )
    with ArrowFileWriter(dataset / "documents" / name, batch.schema, "zstd") as writer:
        writer.write(changed)
    samples, findings = verify_samples(dataset, manifest, tokenizer, 100)
    assert findings == []
    assert 0 < sum(not sample.same_text for sample in samples) == len(texts)
    found = InspectionResult(dataset, manifest, samples=samples)
    assert (
        f"decode to their text, {len(texts)} another (the tokenizer normalizes text, or decodes "
        "U+2581"
    ) in format_inspection(found)


def list_train_files(folder: Path) -> list[TokenFile]:
    return list(iter_token_files(folder, [load_manifest(folder).splits["train"]]))


def change_digest(folder: Path) -> None:
    first, *others = list_train_files(folder)
    write_token_index(folder / INDEX, [first.model_copy(update={"digest": "0" * 32}), *others])
    manifest = load_manifest(folder)
    assert manifest.splits["train"].index is not None
    digest = manifest.splits["train"].index.digest
    changed = manifest.model_dump_json().replace(digest, compute_file_digest(folder / INDEX))
    write_manifest(folder, Manifest.model_validate_json(changed))


def change_counts(folder: Path) -> None:
    manifest = load_manifest(folder)
    split = manifest.splits["train"].model_copy(update={"tokens": 7})
    write_manifest(
        folder, Manifest.model_validate(manifest.model_dump() | {"splits": {"train": split}})
    )


def change_text(folder: Path) -> None:
    """Another tokenizer's ids under the old name: every checksum is right, and the tokens are
    not the text's.
    """
    manifest = load_manifest(folder).model_dump()
    source = (folder / "tokenizer" / "tokenizer.model").read_bytes()
    changed = source.replace("▁people".encode(), "▁peeple".encode()).replace(
        "▁the".encode(), "▁thx".encode()
    )
    (folder / "tokenizer" / "tokenizer.model").write_bytes(changed)
    fingerprint = load_tokenizer(folder / "tokenizer").fingerprint
    files = [
        entry.digest for entry in iter_token_files(folder, load_manifest(folder).splits.values())
    ]
    update = {
        "tokenizer_fingerprint": fingerprint,
        "fingerprint": compute_dataset_fingerprint(fingerprint, files),
    }
    write_manifest(folder, Manifest.model_validate(manifest | update))


TRAIN, KEPT, DROPPED = (
    "tokens/train-00000.arrow",
    "documents/part-00000.arrow",
    "dropped/part-00001.arrow",
)
TABLE, INDEX = "tokens/train-00000.pages", "tokens/train.index"
CHANGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a token file cut": (lambda f: os.truncate(f / TRAIN, 900), TRAIN, "it has 900 bytes, "
    "expected from the manifest:"),
    "a token file gone": (lambda f: (f / TRAIN).unlink(), TRAIN, "it is missing, but the manifest "
    "lists it"),
    "a header": (lambda f: flip(f / TRAIN, 20), TRAIN, "its checksum differs (bytes 0 to"),
    "a page table": (lambda f: flip(f / TABLE, 40), TRAIN, "train-00000.pages, head: its checksum "
    "is"),
    "an index": (lambda f: flip(f / INDEX, 40), INDEX, "train.index: its digest is"),
    "no page table": (lambda f: (f / TABLE).unlink(), TRAIN, "train-00000.pages is missing"),
    "a digest": (change_digest, TRAIN, "bytes between columns changed, no token did"),
    "a sum": (change_counts, "manifest.json", "it lists 7 tokens, but its files have"),
    "a document": (lambda f: flip(f / KEPT, 900), KEPT, "its digest is"),
    "a dropped one": (lambda f: flip(f / DROPPED, 40), DROPPED, "its digest is"),
    "a stranger": (lambda f: (f / "tokens/x.arrow").touch(), "tokens/x.arrow",
        "the manifest does not list it"),
    "the tokenizer": (lambda f: flip(f / "tokenizer/tokenizer.model", 3000), "tokenizer", ""),
    "what tokens mean": (change_text, "tokens (train)", "on its ids differ from the encoding of "
    "its text"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_the_status_is_1(
    name: str, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, file, problem = CHANGES[name]
    change(dataset)
    status, found = said(dataset, capsys)
    assert (status, found["whole"]) == (1, False)
    assert any(one["file"] == file and problem in one["problem"] for one in found["findings"]), (
        found["findings"]
    )


def test_every_flipped_byte_of_a_token_file_is_named_with_its_batch_or_part(dataset: Path) -> None:
    manifest, path = load_manifest(dataset), dataset / TRAIN
    end = load_tokenizer(dataset / "tokenizer").eos_id
    # Of earlier versions, and with a page table.
    entry, paged = describe_token_file(path), list_train_files(dataset)[0]
    whole = path.read_bytes()
    for place in range(0, len(whole), 41):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]
        )
        (first, *_) = verify_token_file(path, entry, manifest.vocab_size or 0, end)
        inside = [i for i, batch in enumerate(entry.batches) if batch.begin <= place < batch.end]
        assert (
            first.where in [f"record batch {inside[0]}", "padding"]
            if inside
            else first.where == "headers"
        )
        (finding,) = verify_token_file(path, paged, manifest.vocab_size or 0, end)
        assert finding.where == f"page {place // 4096}"


@pytest.mark.parametrize(
    "room", ["tokens", "documents", "dropped", "manifest.json", "tokenizer/tokenizer.model"]
)
def test_a_flipped_bit_or_a_cut_anywhere_is_found_and_named(room: str, dataset: Path) -> None:
    choose = random.Random(room)
    for path in [dataset / room] if "." in room else sorted((dataset / room).iterdir()):
        whole = path.read_bytes()
        changed = [whole[: choose.randrange(len(whole))] for _ in range(2)]
        for place in [0, len(whole) - 2, *(choose.randrange(len(whole)) for _ in range(8))]:
            changed.append(
                whole[:place]
                + bytes([whole[place] ^ 1 << choose.randrange(8)])
                + whole[place + 1 :]
            )
        for data in changed:
            path.write_bytes(data)
            assert any(path.name in one or "tokenizer" in one for one in found_in(dataset)), data
        path.write_bytes(whole)
    assert found_in(dataset) == []


def found_in(folder: Path) -> list[str]:
    try:
        return [f"{one.file} {one.problem}" for one in verify_dataset(folder, 0).findings]
    except DataError as error:
        return [str(error)]


def test_the_reader_gives_no_changed_token_and_names_file_and_bytes(dataset: Path) -> None:
    def read() -> list[list[int]]:
        shards = open_tokens(dataset, "train")
        return [shards.get_tokens(number).tolist() for number in range(len(shards.lengths))]

    choose, path, right = random.Random(5), dataset / TRAIN, read()
    whole, said = path.read_bytes(), []
    for place in [0, len(whole) - 2, *(choose.randrange(len(whole)) for _ in range(60))]:
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << choose.randrange(8)]) + whole[place + 1 :]
        )
        try:
            assert read() == right  # lineage, or padding: nothing that training reads
        except DataError as error:
            said.append(str(error))
    assert len(said) > 30
    pattern = rf"{TRAIN}, page \d+ \(bytes [\d,]+ to [\d,]+\): "
    assert [message for message in said if not re.search(pattern, message)] == []


def test_a_token_is_led_back_to_its_record(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = open_tokens(made, "train")
    number = int(shards.lengths[:3].sum()) + 5
    assert main(["inspect", str(made), "--token", f"train:{number}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lineage = shards.get_lineage(3)
    assert (found["document"], found["token_of_document"]) == (3, 5)
    assert {name: found[name] for name in ("id", "file", "offset")} == {
        k: lineage[k] for k in ("id", "file", "offset")
    }
    assert found["url"].startswith("https://example-0.org/")
    text = load_tokenizer(made / "tokenizer").decode(shards.get_tokens(3)[:-1].tolist())
    assert text.startswith(found["before"] + found["piece"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train", r"--token train cannot be parsed\. Write the split and a number"),
        ("train:99999999", r"split train has [\d,]+ tokens\. Use a smaller number"),
        ("test:1", r"has no split 'test'"),
    ],
)
def test_a_token_that_is_not_there_is_refused(
    name: str, message: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(made), "--token", name]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_without_a_manifest_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "Run: llmsys prepare CONFIG" in capsys.readouterr().err


def test_findings_stand_in_columns() -> None:
    table = format_findings(
        [DatasetFinding("tokens/a", "record batch 12", "bad"), DatasetFinding("b", "", "gone")]
    )
    assert table.splitlines()[1:] == ["tokens/a  record batch 12  bad", f"b{' ' * 26}gone"]


def test_the_usage_of_the_tokenizer_is_what_a_plain_count_gives(made: Path) -> None:
    usage = load_manifest(made).usage
    tokenizer = load_tokenizer(made / "tokenizer")
    rows = [
        row
        for name in sorted(os.listdir(made / "documents"))
        for row in rows_of(made / "documents" / name)
    ]
    encoded = [tokenizer.encode(row["text"]) for row in rows]
    assert usage is not None
    english = usage.languages["en"]
    assert english.documents == len(rows)
    assert english.bytes == sum(len(row["text"].encode()) for row in rows)
    assert english.words == sum(len(row["text"].split()) for row in rows)
    assert english.tokens == sum(map(len, encoded))
    byte_ids = {tokenizer.find_piece_id(f"<0x{byte:02X}>") for byte in range(256)}
    assert english.byte_tokens == sum(token in byte_ids for ids in encoded for token in ids) > 0
    assert english.unknown_tokens == 0
    used = set(np.concatenate([np.array(ids) for ids in encoded]).tolist())
    assert usage.dead_pieces == len(tokenizer.get_text_pieces().keys() - used)
    assert usage.checked_documents > 0
    assert verify_dataset(made, 1).findings == []
