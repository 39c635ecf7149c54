"""`llmsys init` writes a legal config for what it finds, and prints commands that follow from
it.
"""

import gzip
import json
import random
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import read_batches
from llmsys.launch.commands.init import TEMPLATES
from llmsys.launch.main import build_parser, main
from tests.helpers.example_run import write_dataset, write_run
from tests.helpers.saved_dataset import save_to_disk
from tests.helpers.tiny_crawl import make_crawl

HUGGING_FACE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


WORDS = """
the house of a person who went home early and then found that every window was open because some
other people had been there before with their children to look for water under stones while rain
came down on green fields between river and mountain until morning light showed
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[RunConfig, list[str]]:
    """The config that init writes, and the commands it prints, each of which must be one that
    llmsys takes.
    """
    assert main(["init", *words, "--json"]) == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    for command in result["next"]:
        program, verb, *rest = shlex.split(command)
        assert program == "llmsys"
        build_parser(verb).parse_intermixed_args(rest)
    return load_run_config(result["config"]), result["next"]


def test_a_crawl_gets_the_rules_for_pages(capsys: pytest.CaptureFixture[str]) -> None:
    make_crawl(Path("crawl"))
    config, commands = init(capsys, "crawl")
    assert config.data.inputs == ("crawl/*.warc.gz",)
    assert [rule.kind for rule in config.data.rules] == [
        "gopher_repetition",
        "gopher_quality",
        "c4_datatrove",
    ]
    assert config.tokenizer.vocab_size == config.model.vocab_size == 512
    assert commands[0] == "llmsys train my.yaml --prepare"


def test_a_folder_of_saved_pages_is_a_crawl(capsys: pytest.CaptureFixture[str]) -> None:
    """As a browser or a mirroring program saves them: a file each, in folders, in any charset."""
    source = random.Random(0)
    words = WORDS.split()
    for number in range(30):
        text = "".join(
            f"<p>{' '.join(source.choices(words, k=30)).capitalize()}, for the Straße of Ärzte.</p>"
            for _ in range(12)
        )
        page = (
            f"<html><head><title>{number}</title></head><body><nav>Home | Up | Next</nav>"
            f"<article><h1>Page {number}</h1>{text}</article></body></html>"
        )
        path = Path("pages") / f"part{number % 3}" / f"{number}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(page.encode("utf-8" if number % 2 else "cp1252"))
    config, commands = init(capsys, "pages")
    assert config.data.inputs == ("pages/**/*.html",)
    assert config.data.rules == ()  # somebody has chosen them
    assert config.data.split.heldout_fraction == pytest.approx(4 / 30, rel=0.05)
    assert commands[0] == "llmsys train my.yaml --prepare"
    prepare_dataset(load_run_config("my.yaml", ["data.executor.kind=inline"]), "documents")
    texts = [
        text
        for path in Path("runs/pages-data/documents").glob("*.arrow")
        for batch in read_batches(path)
        for text in batch.column("text").to_pylist()
    ]
    assert len(texts) == 30
    assert all("for the Straße of Ärzte." in text and "<p>" not in text for text in texts)


def test_few_text_files_have_more_held_out_and_one_is_not_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each file is one document, and one of twenty would not be held out of a novel in one file."""
    Path("texts").mkdir()
    for number in range(12):
        Path(f"texts/{number}.txt").write_text(f"A text of the folder, number {number}. " * 50)
    config, _ = init(capsys, "texts")
    assert config.data.split.heldout_fraction == pytest.approx(0.3)
    Path("novel").mkdir()
    Path("novel/novel.txt").write_text("Once upon a time there was a tokenizer. " * 500)
    for words in ([], ["--minutes", "5"]):
        assert main(["init", "novel", *words, "--output", "novel.yaml"]) == 2
        error = capsys.readouterr().err
        assert "has 1, a file each. Split them into 10 or more, such as with: split " in error
        assert not Path("novel.yaml").exists()
    Path("page").mkdir()
    Path("page/page.html").write_text("<p>Once upon a time there was a tokenizer.")
    assert main(["init", "page", "--output", "page.yaml"]) == 2
    assert "a file each. Give a folder with 10 pages or more." in capsys.readouterr().err


def test_tokens_of_one_pass_are_told_by_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows").mkdir()
    text = "a text of the folder. " * 100
    Path("rows/one.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for _ in range(80)))
    )
    init(capsys, "rows")
    # 176,000 bytes of text in a file of about one thousand, at 2.2 bytes a token.
    assert "by a sample about 80,000" in Path("my.yaml").read_text()


def test_rows_are_read_from_the_column_that_holds_the_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("rows/deep").mkdir(parents=True)
    pq.write_table(pa.table({"id": ["a"], "body": ["a long enough text"]}), "rows/deep/one.parquet")
    Path("lines").mkdir()
    Path("lines/one.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "a", "other": "longer than the text"}\n')
    )
    config, _ = init(capsys, "rows", "--output", "rows.yaml")
    assert (config.data.inputs, config.data.read.text_field) == (("rows/**/*.parquet",), "body")
    assert config.data.rules == ()
    config, _ = init(capsys, "lines", "--output", "lines.yaml")
    assert (config.data.inputs, config.data.read.text_field) == (("lines/*.jsonl.gz",), "text")


@pytest.mark.parametrize(
    ("name", "delimiter", "compress"),
    [("a.csv", ",", bytes), ("a.csv.gz", ";", gzip.compress), ("a.tsv", "\t", bytes)],
)
def test_csv_is_read_from_the_column_that_holds_the_texts(
    capsys: pytest.CaptureFixture[str],
    name: str,
    delimiter: str,
    compress: Callable[[bytes], bytes],
) -> None:
    body = '"One; two, three.\n\tAnd a ""fourth"", which is the longest."'
    lines = [delimiter.join(["title", "body", "score"]), delimiter.join(["A", body, "1"])]
    Path("rows").mkdir()
    Path("rows", name).write_bytes(compress(b"\xef\xbb\xbf" + "\n".join(lines).encode()))
    config, _ = init(capsys, "rows")
    ending = name.removeprefix("a")
    assert (config.data.inputs, config.data.read.text_field) == ((f"rows/*{ending}",), "body")
    manifest = prepare_dataset(config, until="documents")
    assert (manifest.read.records, manifest.funnel[-1].documents_out) == (1, 1)


def test_csv_without_a_column_of_text_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows").mkdir()
    Path("rows/a.csv").write_text("score,votes\n,\n")
    assert main(["init", "rows"]) == 2
    assert "no column with text (columns: score, votes)" in capsys.readouterr().err


def test_a_stream_of_arrow_as_datasets_are_stored_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("set").mkdir()
    table = pa.table({"content": ["a text"]})
    with (
        pa.OSFile("set/data-00000-of-00001.arrow", "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    Path("set/dataset_info.json").write_text("{}")
    config, _ = init(capsys, "set")
    assert (config.data.inputs, config.data.read.text_field) == (("set/*.arrow",), "content")


def test_a_model_and_texts_make_a_run_that_continues_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hub/tiny").mkdir(parents=True)
    Path("hub/tiny/config.json").write_text(json.dumps(HUGGING_FACE))
    Path("hub/tiny/tokenizer.json").write_text("{}")
    Path("texts").mkdir()
    for name in ("a", "b"):
        Path(f"texts/{name}.txt").write_text("one text")
    Path("texts/README.md").write_text("")
    config, commands = init(capsys, "hub/tiny", "texts", "--output", "texts/tiny.yaml")
    assert (config.tokenizer.kind, config.tokenizer.path) == ("file", Path("hub/tiny"))
    assert (config.model.hidden_size, config.batch.sequence_length) == (16, 64)
    assert (config.data.inputs, config.train.init_from) == (
        ("texts/*.txt",),
        Path("runs/tiny-weights"),
    )
    assert [command.split()[1] for command in commands] == ["convert", "train", "convert"]


def test_a_dataset_is_trained_on_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(Path("made"))
    config, _ = init(capsys, "made")
    assert config.data.folder == Path("made")


def test_templates_run_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    for template in TEMPLATES:
        assert main(["init", "--template", template, "--output", f"my_{template}.py"]) == 0
        assert f"next:\n  python my_{template}.py" in capsys.readouterr().out
        runpy.run_path(f"my_{template}.py", run_name="__main__")
        assert capsys.readouterr().out
    assert main(["init", "--template", "rule", "--output", "my.yaml"]) == 2
    assert "Add --output my_rules.py" in capsys.readouterr().err


def test_a_saved_dataset_is_named_as_a_folder_so_that_its_test_split_is_not_trained_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for split in ("train", "test"):
        save_to_disk(
            Path("both") / split, split, [{"body": f"some text for the split {split}", "url": "u"}]
        )
    Path("both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    config, _ = init(capsys, "both", "--output", "both.yaml")
    assert [str(one) for one in config.data.inputs] == ["both"]
    assert config.data.read.text_field == "body"
    assert main(["init", "both", "--output", "again.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "found 1 Arrow file, 0.0 MB: both\nfound splits that are not read: test (" in printed


def test_what_is_there_is_not_overwritten_or_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    write_run(Path("run"))
    Path("odd").mkdir()
    Path("odd/a.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    Path("megatron").mkdir()
    for name, size in (("heldout.idx", 1), ("heldout.bin", 1), ("train.idx", 2), ("train.bin", 2)):
        Path("megatron", name).write_bytes(bytes(size))
    Path("there.yaml").write_text("run: {}\n")
    for words, message in (
        (["empty"], "empty has no files that llmsys reads"),
        (["nowhere"], "nowhere does not exist"),
        (["megatron"], "Read them with data: {kind: tokens, inputs: [megatron/train.idx]}"),
        (["run"], "run is a run folder, which is a config already. Use it: llmsys train run"),
        (["odd"], "has no column with text (columns: messages)"),
        (["odd", "--output", "there.yaml"], "there.yaml exists, and a config is not overwritten"),
    ):
        assert main(["init", *words]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in Path().glob("*.yaml")) == ["there.yaml"]


def test_texts_of_every_language_are_kept_and_files_that_are_not_read_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("texts").mkdir()
    for name in ("a", "b"):
        Path(f"texts/{name}.txt").write_text("Järven rannalla seisoi vanha sauna. " * 9)
    Path("texts/b.jsonl").write_text('{"text": "a"}\n')
    config, _ = init(capsys, "texts", "--output", "texts.yaml")
    assert (config.data.language.languages, config.data.language.min_score) == ((), 0)
    assert main(["init", "texts", "--output", "again.yaml"]) == 0
    assert (
        "but left out 1 JSON lines file in texts: of a folder's formats" in capsys.readouterr().out
    )
    make_crawl(Path("crawl"))
    config, _ = init(capsys, "crawl", "--output", "crawl.yaml")
    assert (config.data.language.languages, config.data.language.min_score) == ((), 0.65)
    Path("array").mkdir()
    Path("array/a.json").write_text('[{"text": "a"}]')
    assert main(["init", "array"]) == 2
    assert "array/a.json holds one JSON array, but JSON lines are needed" in capsys.readouterr().err
