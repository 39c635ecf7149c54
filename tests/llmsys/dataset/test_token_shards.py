"""Laws of the shard on disk: what was written is read, damage is named, and nothing half-written
is taken for whole.
"""

import contextlib
import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from llmsys.dataset import token_shards
from llmsys.dataset.mapped_token_shards import MappedTokenFile
from llmsys.errors import DataError, FormatError
from tests.helpers.token_files import TOKENIZER, build_token_manifest, write_tokens

DOCUMENTS = [[5, 6, 2], [2], [9, 8, 7, 6, 5, 4, 2], [65535, 2], [11, 12, 13, 2]]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens" / "train-00000.arrow", DOCUMENTS[:3])
    write_tokens(tmp_path / "tokens" / "train-00001.arrow", DOCUMENTS[3:])
    files = tuple(
        token_shards.describe_token_file(tmp_path / "tokens" / f"train-0000{i}.arrow")
        for i in range(2)
    )
    split = token_shards.Split(
        documents=sum(file.rows for file in files),
        tokens=sum(file.tokens for file in files),
        bytes=sum(file.text_bytes for file in files),
        files=files,
    )
    empty = token_shards.Split(documents=0, tokens=0, bytes=0, files=())
    splits = {"train": split, "heldout": empty}
    manifest = build_token_manifest(splits, [file.digest for file in files])
    token_shards.write_manifest(tmp_path, manifest)
    return tmp_path


def flip(path: Path, needle: bytes, bit: int = 1) -> None:
    """Flip one bit of the first occurrence of some bytes that the test knows to be in the file."""
    data = bytearray(path.read_bytes())
    data[data.index(needle)] ^= bit
    path.write_bytes(data)


def test_what_was_written_is_read(dataset: Path) -> None:
    tokens = token_shards.open_tokens(dataset, "train")
    assert [tokens.get_tokens(i).tolist() for i in range(tokens.num_documents)] == DOCUMENTS
    assert tokens.lengths.tolist() == [len(document) for document in DOCUMENTS]
    assert tokens.text_bytes.tolist() == [3 * len(document) for document in DOCUMENTS]
    assert (tokens.num_tokens, tokens.num_text_bytes) == (17, 51)
    assert tokens.get_lineage(2) == {
        "id": f"{2:032x}",
        "file": "crawl/a.warc.gz",
        "offset": 200,
        "url_hash": 2,
    }
    assert token_shards.verify_checksums(dataset).fingerprint == tokens.fingerprint


def test_tokens_are_read_only_views_of_the_mapped_file(dataset: Path) -> None:
    tokens = token_shards.open_tokens(dataset, "train")
    first, again = tokens.get_tokens(2), tokens.get_tokens(2)
    assert first.dtype == np.uint16
    assert not first.flags.owndata
    assert not first.flags.writeable
    assert first.ctypes.data == again.ctypes.data


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tokens(tmp_path / name, DOCUMENTS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_flipped_token_is_named_with_file_and_batch_on_first_touch(dataset: Path) -> None:
    path = dataset / "tokens" / "train-00000.arrow"
    flip(path, np.array(DOCUMENTS[2], np.uint16).tobytes())
    tokens = token_shards.open_tokens(dataset, "train")
    assert tokens.get_tokens(0).tolist() == DOCUMENTS[0]
    with pytest.raises(
        DataError,
        match=r"train-00000\.arrow, record batch 1: the checksum of its tokens .* damaged",
    ):
        tokens.get_tokens(2)
    with pytest.raises(
        DataError,
        match=r"train-00000\.arrow: its digest is \w+, expected from the manifest: \w+: the file "
        r"was",
    ):
        token_shards.verify_checksums(dataset)


def test_flipped_lengths_are_noticed_before_packing_can_trust_them(dataset: Path) -> None:
    flip(dataset / "tokens" / "train-00000.arrow", np.array([0, 3, 4], np.int32).tobytes()[4:])
    with pytest.raises(
        DataError, match=r"train-00000\.arrow, record batch 0: the checksum of its document lengths"
    ):
        token_shards.open_tokens(dataset, "train")


def test_flipped_lineage_is_noticed_when_asked(dataset: Path) -> None:
    flip(dataset / "tokens" / "train-00001.arrow", b"crawl/a.warc.gz")
    tokens = token_shards.open_tokens(dataset, "train")
    assert tokens.get_tokens(3).tolist() == DOCUMENTS[3]
    with pytest.raises(
        DataError, match=r"train-00001\.arrow, record batch 0: the checksum of its lineage"
    ):
        tokens.get_lineage(3)


def test_every_flipped_bit_of_the_file_is_noticed_by_verify_and_no_wrong_token_is_ever_read(
    dataset: Path,
) -> None:
    path = dataset / "tokens" / "train-00001.arrow"
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(
            whole[:position]
            + bytes([whole[position] ^ (1 << position % 8)])
            + whole[position + 1 :]
        )
        with pytest.raises(DataError, match=r"train-00001\.arrow"):
            token_shards.verify_checksums(dataset)
        with contextlib.suppress(DataError):
            tokens = token_shards.open_tokens(dataset, "train")
            # Not refused: then the flip lies in padding or in lineage, and the tokens are right.
            assert [tokens.get_tokens(i).tolist() for i in range(tokens.num_documents)] == DOCUMENTS


@pytest.mark.parametrize("lost", [1, 100, 10_000])
def test_a_truncated_file_is_refused_at_open(dataset: Path, lost: int) -> None:
    path = dataset / "tokens" / "train-00001.arrow"
    os.truncate(path, max(0, path.stat().st_size - lost))
    with pytest.raises(
        DataError,
        match=r"train-00001\.arrow has [\d,]+ bytes, expected from the manifest: [\d,]+\. Delete "
        r"the",
    ):
        token_shards.open_tokens(dataset, "train")


def test_a_file_cut_at_any_length_is_refused(dataset: Path) -> None:
    path = dataset / "tokens" / "train-00001.arrow"
    entry, whole = token_shards.describe_token_file(path), path.read_bytes()
    for length in range(len(whole) - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(
            DataError,
            match=rf"train-00001\.arrow has {length:,} bytes, expected from the manifest:",
        ):
            MappedTokenFile(path, entry)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_lineage_is_not_read_from_the_disk_while_training_reads_tokens(tmp_path: Path) -> None:
    """The pages of the mapped file that this process has touched are those of tokens, not of 16
    MB of lineage.
    """
    path, schema = tmp_path / "train-00000.arrow", token_shards.build_token_schema("uint16")
    rows = 4_000
    columns = {
        "tokens": [[number % 500, 2] for number in range(rows)],
        "id": [f"{number:032x}" for number in range(rows)],
        "file": ["x" * 4_096] * rows,
        "offset": list(range(rows)),
        "url_hash": list(range(rows)),
        "text_bytes": [3] * rows,
    }
    with token_shards.ArrowFileWriter(path, schema) as writer:
        writer.write(pa.record_batch(columns, schema=schema))
    entry = token_shards.describe_token_file(path)
    tokens = MappedTokenFile(path, entry)
    assert int(tokens.get_batch_tokens(0).sum()) == sum(number % 500 + 2 for number in range(rows))
    assert resident_bytes(path) < 1_000_000 < entry.size
    assert tokens.get_lineage(0, 3)["file"] == "x" * 4_096
    assert resident_bytes(path) > 16_000_000


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    _, _, behind = Path("/proc/self/smaps").read_text().partition(str(path))
    (line,) = [line for line in behind.splitlines()[:8] if line.startswith("Rss:")]
    return int(line.split()[1]) * 1024


def test_a_missing_file_says_what_to_run(dataset: Path) -> None:
    (dataset / "tokens" / "train-00001.arrow").unlink()
    with pytest.raises(
        DataError, match=r"train-00001\.arrow is missing, but the manifest .* Run llmsys prepare"
    ):
        token_shards.open_tokens(dataset, "train")


def test_a_missing_or_damaged_manifest_says_what_to_run(dataset: Path) -> None:
    path = dataset / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(
        DataError, match=r"manifest\.json cannot be used: .* run llmsys prepare CONFIG again"
    ):
        token_shards.open_tokens(dataset, "train")
    path.unlink()
    with pytest.raises(DataError, match=r"manifest\.json does not exist, .* Run: llmsys prepare"):
        token_shards.open_tokens(dataset, "train")


def test_a_manifest_of_another_version_is_refused(dataset: Path) -> None:
    path = dataset / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(
        FormatError,
        match=r"manifest\.json has manifest format 3, written by a newer llmsys; .* format 2",
    ):
        token_shards.load_manifest(dataset)


def test_another_tokenizer_is_refused(dataset: Path) -> None:
    tokens = token_shards.open_tokens(dataset, "train")
    tokens.require_tokenizer(TOKENIZER)
    with pytest.raises(
        DataError, match=rf"were made by tokenizer {TOKENIZER}, not by cdcd, .* Use .*tokenizer"
    ):
        tokens.require_tokenizer("cdcd")


def test_an_empty_or_unknown_split_is_refused(dataset: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"split 'heldout' of .* has no documents\. Set data\.split\.heldout_fraction",
    ):
        token_shards.open_tokens(dataset, "heldout")
    with pytest.raises(DataError, match=r"has no split 'test', it has train, heldout"):
        token_shards.open_tokens(dataset, "test")


def test_a_block_left_by_an_error_publishes_nothing(tmp_path: Path) -> None:
    schema = token_shards.build_token_schema("uint32")

    def fail() -> None:
        with token_shards.ArrowFileWriter(tmp_path / "x.arrow", schema):
            assert len(list(tmp_path.iterdir())) == 1
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match=r"x\.arrow could not be written: No space left on device\. No partial"
    ):
        write_tokens(tmp_path / "x.arrow", DOCUMENTS)
    with pytest.raises(
        DataError, match=r"manifest\.json could not be written: No space left on device"
    ):
        token_shards.write_bytes_atomically(tmp_path / "manifest.json", b"{}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_disk_that_refuses_the_bytes_is_one_message(tmp_path: Path) -> None:
    aside = tmp_path / f".x.arrow.{os.getpid()}.tmp"
    aside.symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"x\.arrow could not be written: No space left on device"):
        write_tokens(tmp_path / "x.arrow", [list(range(60_000))] * 4)
    assert list(tmp_path.iterdir()) == []
