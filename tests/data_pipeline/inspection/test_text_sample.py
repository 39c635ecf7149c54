"""A sample of a crawl or of documents gives the share of text that preparing them keeps."""

import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from llmsys.config.data import CrawlConfig
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.inspection import text_sample
from llmsys.data_pipeline.inspection.text_sample import measure_text_sample, measure_text_share
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.page_batch import PageBatch
from llmsys.data_pipeline.readers.page_reader import read_pages
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl


def get_data(config: RunConfig) -> CrawlConfig:
    assert isinstance(config.data, CrawlConfig)
    return config.data


def test_the_share_of_files_that_are_read_whole_is_that_of_the_dataset(tmp_path: Path) -> None:
    crawl = make_crawl(tmp_path / "crawl")
    config = build_tiny_config(tmp_path / "data", crawl)
    funnel = {stage.stage: stage for stage in prepare_dataset(config, "documents").funnel}
    stored = sum(path.stat().st_size for path in crawl.glob("*.warc.gz"))
    kept = funnel["gopher_quality"].bytes_out
    assert kept < funnel["extract"].bytes_out
    assert measure_text_share(get_data(config), is_crawl=True) == pytest.approx(kept / stored)


def write_rows(path: Path, count: int) -> None:
    rows = (json.dumps({"text": f"text {number} " * 50, "n": number}) for number in range(count))
    path.write_bytes(gzip.compress("\n".join(rows).encode()))


def test_text_in_rows_is_counted_per_byte_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    write_rows(path, 300)
    config = build_tiny_config(tmp_path / "data", [str(path)])
    text = sum(len(f"text {number} " * 50) for number in range(300))
    share = measure_text_share(get_data(config), is_crawl=False)
    assert share == pytest.approx(text / path.stat().st_size, rel=0.01)
    assert share > 1


def test_no_more_than_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sample, "SAMPLED_BYTES", 1_000)
    for number in range(9):
        write_rows(tmp_path / f"{number}.jsonl.gz", 300)
    read: list[str] = []

    def read_in_small_batches(path: str, **options: object) -> Iterator[PageBatch]:
        for batch in read_pages(path, batch_pages=10, **options):  # type: ignore[arg-type]
            read.append(Path(path).name)
            yield batch

    monkeypatch.setattr(text_sample, "read_pages", read_in_small_batches)
    config = build_tiny_config(tmp_path / "data", [str(tmp_path / "*.jsonl.gz")])
    assert measure_text_share(get_data(config), is_crawl=False) is not None
    # one batch of each
    assert read == ["0.jsonl.gz", "2.jsonl.gz", "4.jsonl.gz", "6.jsonl.gz"]


def test_files_without_text_have_no_share(tmp_path: Path) -> None:
    (tmp_path / "broken.warc.gz").write_bytes(b"no archive")
    config = build_tiny_config(tmp_path / "data", [str(tmp_path / "broken.warc.gz")])
    assert measure_text_share(get_data(config), is_crawl=True) is None


def test_characters_are_counted_in_a_sample_of_a_fixed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sample, "TOKENIZED_BYTES", 4_000)
    folder = tmp_path / "rows"
    folder.mkdir()
    texts = [f"№ {number} " * 200 + "x" * 500 for number in range(4)]
    for number, text in enumerate(texts):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": text}))
    config = build_tiny_config(tmp_path / "data", [f"{folder}/*.jsonl"])
    sample = measure_text_sample(get_data(config), is_crawl=False)
    assert sample is not None
    # A quarter of the sample of each file: №, space and line end, and the digits 0 to 3.
    assert sample.num_characters == 7
    assert sample.bytes_per_token == {}


def test_the_sample_has_texts_from_everywhere_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sample, "TOKENIZED_BYTES", 1_000)
    path = tmp_path / "rows.jsonl"
    # Of ten texts of 400 bytes, those at 0, 4 and 8: a, e, i and the line ends between them.
    path.write_text("\n".join(json.dumps({"text": letter * 400}) for letter in "abcdefghij"))
    config = build_tiny_config(tmp_path / "data", [str(path)])
    sample = measure_text_sample(get_data(config), is_crawl=False)
    assert sample is not None
    assert sample.num_characters == 4


def test_tokens_are_measured_on_lines_that_their_tokenizer_has_not_seen(tmp_path: Path) -> None:
    chance = random.Random(5)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 7))) for _ in range(400)]
    lines = [" ".join(chance.choices(words, k=12)) for _ in range(400)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    config = build_tiny_config(tmp_path / "data", [str(path)])
    sample = measure_text_sample(get_data(config), is_crawl=False, vocabularies=(512, 1 << 15))
    assert sample is not None

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for i, line in enumerate(lines) if i % 4 != 3]),
        model_writer=model,
        model_type="bpe",
        vocab_size=512,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    text = "\n".join(lines[3::4])
    # 32,768 pieces are more than this text has.
    assert sample.bytes_per_token == {512: len(text) / len(processor.encode(text))}
