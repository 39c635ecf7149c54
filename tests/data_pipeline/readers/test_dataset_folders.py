"""Laws of inputs from elsewhere: datasets of Hugging Face's library, fields per input, chats,
own held-out files.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from fsspec.registry import _registry  # type: ignore[import-untyped]

from llmsys.config.cleaning import ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.loading.load import load_run_config
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.input_files import find_input_files, find_inputs
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import ConfigError, DataError
from tests.helpers.saved_dataset import save_to_disk
from tests.helpers.tiny_crawl import build_tiny_config, write_sentences


def read_texts(path: Path, **fields: str) -> list[str]:
    batches = read_pages(str(path), max_page_bytes=10_000, config=ReadConfig(**fields))
    return [text for batch in batches for text in batch.pages.column("text").to_pylist()]


def test_a_saved_dataset_gives_its_training_split_or_the_one_that_is_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / "both" / split, split, [{"text": split}])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (found,) = find_inputs([str(tmp_path / "both")])
    assert read_texts(Path(found)) == ["train"]
    (found,) = find_inputs([str(tmp_path / "both")], split="test")
    assert read_texts(Path(found)) == ["test"]
    with pytest.raises(
        DataError,
        match=r"both has no split 'dev'; it has test, train\. Give one: \{path: .*split: tes",
    ):
        find_inputs([str(tmp_path / "both")], split="dev")
    # one split alone is read, whatever its name
    assert find_inputs([str(tmp_path / "both" / "test")]) == [found]
    state = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "both" / "train" / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        DataError, match=r"selection of them \(indices\)\. Save it after flatten_indices"
    ):
        find_inputs([str(tmp_path / "both")])


HEAD = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/*.parquet"}
  - {split: validation, path: [en/held/**/*.parquet]}
- config_name: de
  default: true
  data_files: de.parquet
---
# A dataset
"""


def test_subsets_and_splits_of_a_hub_folder_are_those_of_its_readme(tmp_path: Path) -> None:
    for name in ("en/a.parquet", "en/held/deep/b.parquet", "de.parquet", "en/notes.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "README.md").write_text(HEAD)

    def find(split: str = "", subset: str = "") -> list[str]:
        return [
            str(Path(path).relative_to(tmp_path))
            for path in find_inputs([str(tmp_path)], "x", split, subset)
        ]

    assert find() == ["de.parquet"]
    assert find(subset="en") == ["en/a.parquet"]
    assert find("validation", "en") == ["en/held/deep/b.parquet"]
    with pytest.raises(DataError, match=r"no subset 'fr'; it has en, de\. Give one: "):
        find(subset="fr")


@pytest.fixture
def hub() -> Iterator[Any]:
    """The protocol of the hub, served from memory."""

    class HubFileSystem(MemoryFileSystem):
        protocol = "hf"
        store: dict[str, Any] = {}  # noqa: RUF012 - as its base has them
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return f"/{path.removeprefix('hf://').strip('/')}"

    fsspec.register_implementation("hf", HubFileSystem, clobber=True)
    yield fsspec.filesystem("hf")
    _registry.pop("hf")


def test_a_name_on_the_hub_gives_the_files_of_a_split_by_their_names(hub: Any) -> None:
    for name in ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
        "README.md",
                 "data/validation-00000-of-00001.parquet",
                 "data/forget-00000-of-00001.parquet"):  # fmt: skip
        hub.pipe(f"/datasets/owner/name/{name}", b"x")
    url = "hf://datasets/owner/name"
    assert find_inputs([url]) == [f"{url}/data/train-0000{i}-of-00002.parquet" for i in range(2)]
    assert find_inputs([url], split="forget") == [f"{url}/data/forget-00000-of-00001.parquet"]
    hub.pipe("/datasets/owner/plain/part.jsonl", b"x")
    hub.pipe("/datasets/owner/plain/README.md", b"x")
    assert find_inputs(["hf://datasets/owner/plain/"]) == ["hf://datasets/owner/plain/part.jsonl"]
    hub.pipe("/datasets/owner/tables/a.csv", b"x")
    with pytest.raises(
        DataError, match=r"no files to read: a\.csv\. Write it as parquet or JSON lines"
    ):
        find_inputs(["hf://datasets/owner/tables"])


CHAT = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": [{"type": "text", "text": "Here."}]},
]


def test_chats_are_documents_of_their_messages(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    chats: list[Any] = [CHAT, [{"from": "human", "value": "Hi"}], [{"role": "user"}], image]
    rows = [*({"messages": chat} for chat in chats), {"text": "no chat"}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_texts(path, text_field="messages") == [
        "user: Where?\n\nassistant: Here.",
        "human: Hi",
    ]
    batches = list(
        read_pages(str(path), max_page_bytes=10_000, config=ReadConfig(text_field="messages"))
    )
    assert [skip.reason for batch in batches for skip in batch.skipped] == [
        "no text in field 'messages': no field has text",
        "a message in field 'messages' has content other than text",
        "no text in field 'messages': text is in 'text' (data.read.text_field names the field)",
    ]
    table = pa.table(
        {"talk": [[{"role": "user", "content": "Where?"}]], "id": ["a"], "number": [3]}
    )
    pq.write_table(table, tmp_path / "chats.parquet")
    assert read_texts(tmp_path / "chats.parquet", text_field="talk") == ["user: Where?"]
    table = pa.table({"page": [{"content": "a", "url": "b"}, None]})
    pq.write_table(table, tmp_path / "nested.parquet")
    assert read_texts(tmp_path / "nested.parquet", text_field="page.content") == ["a"]
    config = ReadConfig(text_field="page.contents")
    (batch,) = read_pages(str(tmp_path / "nested.parquet"), max_page_bytes=10_000, config=config)
    assert {skip.reason for skip in batch.skipped} == {
        "no text in field 'page.contents': text is in 'page.content', 'page.url' "
        "(data.read.text_field names the field)"
    }
    (batch,) = read_pages(str(tmp_path / "chats.parquet"), max_page_bytes=10_000)
    assert [skip.reason for skip in batch.skipped] == [
        "no text in field 'text': text is in 'id', 'talk' (data.read.text_field names the field)"
    ]


def write_rows(path: Path, field: str, first: int, count: int) -> None:
    texts = [" ".join(write_sentences(random.Random(first + i), 12)) for i in range(count)]
    path.write_text(
        "".join(
            json.dumps({field: text, "id": f"{path.stem}-{i}"}) + "\n"
            for i, text in enumerate(texts)
        )
    )


def test_inputs_have_fields_of_their_own_and_named_files_are_held_out_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", "text", 0, 12)
    write_rows(tmp_path / "b.jsonl", "body", 100, 6)
    write_rows(tmp_path / "held.jsonl", "content", 200, 3)
    held = {"path": str(tmp_path / "held.jsonl"), "text_field": "content"}
    inputs: list[Any] = [
        str(tmp_path / "a.jsonl"),
        {"path": str(tmp_path / "b.jsonl"), "text_field": "body"},
    ]
    config = build_tiny_config(tmp_path / "data", inputs, heldout_inputs=[held], rules=[])
    assert isinstance(config.data, CrawlConfig)
    manifest = prepare_dataset(config)
    assert [manifest.splits[split].documents for split in ("train", "heldout")] == [18, 3]
    (entry,) = (tmp_path / "data" / "tokens").glob("heldout-*.arrow")
    names = [name for batch in read_batches(entry) for name in batch.column("id").to_pylist()]
    assert sorted(names) == ["held-0", "held-1", "held-2"]
    # the tokenizer has seen training documents only, and a second run makes nothing again
    made = json.loads((tmp_path / "data" / "tokenizer" / "made.json").read_text())
    assert made["sample"]["documents"] == 18
    assert prepare_dataset(config) == manifest
    assert manifest.config["data"]["inputs"][1]["text_field"] == "body"
    with pytest.raises(
        DataError, match=r"a\.jsonl' is also in data\.inputs, so its documents would be in training"
    ):
        find_input_files(
            config.data.model_copy(update={"heldout_inputs": (str(tmp_path / "*.jsonl"),)})
        )
    twice = (*config.data.inputs, config.data.inputs[1].model_copy(update={"text_field": "text"}))
    with pytest.raises(
        DataError, match=r"data\.inputs\.2: '.*b\.jsonl' is in another entry too, with other fields"
    ):
        find_input_files(config.data.model_copy(update={"inputs": twice}))


def test_a_wrong_key_of_an_input_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("train/demo", ["data.inputs=[{path: a, text_feld: b}, {split: c}, 3]"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("3 problems")
    assert "data.inputs.0.text_feld: unknown key. Did you mean text_field?" in lines[1]
    assert "data.inputs.1.path: is missing." in lines[2]
    assert "data.inputs.2: 3 is not text." in lines[3]
