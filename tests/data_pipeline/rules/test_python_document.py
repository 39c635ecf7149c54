"""Rules, annotators and mappers of the user's own see every column; an annotator adds columns and
drops nothing, a mapper changes texts and is counted.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.config.custom_rules import AnnotatorConfig, MapperConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.inspection.explain_page import explain_url
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.rules.document_row import DocumentRow
from llmsys.data_pipeline.rules.python_document import (
    LoadedAnnotator,
    LoadedMapper,
    check_python_annotator,
    check_python_mapper,
    load_python_annotator,
)
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from llmsys.dataset.manifest import Manifest
from llmsys.errors import ConfigError, DataError, LlmsysError
from llmsys.launch.commands.templates.annotator import Origin
from llmsys.launch.commands.templates.mapper import Titled
from tests.data_pipeline.pipelines.test_input_columns import make_rows, read_files, write_lines
from tests.helpers.tiny_crawl import GERMAN, build_tiny_config

OWN = """
import datetime
import json

from llmsys.data_pipeline.rules.python_document import DocumentRule, PythonAnnotator, PythonMapper
from llmsys.data_pipeline.rules.rule import ThresholdTest


class Seen(PythonAnnotator):
    def list_columns(self):
        return {"all": str, "number": int, "half": float, "even": bool}

    def annotate(self, document):
        number = document.fields.get("number")
        row = vars(document) | {"fields": {n: repr(v) for n, v in document.fields.items()}}
        half = None if number is None else number / 2
        even = None if number is None else number % 2 == 0
        return {"all": json.dumps(row), "number": number, "half": half, "even": even}


class Few(DocumentRule):
    most: int = 5

    def measure_document(self, document):
        return {"number": float(document.measured["again.number"])}

    def list_limits(self):
        return [ThresholdTest("number", "number", "above", self.most)]


class Upper(PythonMapper):
    def map_text(self, document):
        return document.text.upper() if document.fields["number"] % 2 else document.text
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return tmp_path


def prepare(inputs: list[str], rules: list[dict[str, Any]]) -> Manifest:
    config = build_tiny_config(
        "data", inputs, rules=rules, deduplicate={"minhash": {"kind": "none"}}
    )
    return prepare_dataset(config, until="documents")


def test_they_see_every_column_and_what_the_ones_before_added(in_folder: Path) -> None:
    rows = [row for row in make_rows(20) if len(row["text"]) > 50]
    for number, row in enumerate(rows):
        row |= {"number": number, "url": f"http://a.org/{number}", "language": "mine"}
        row |= {"tags": [number, "x"], "date": "2024-05-01"}
    write_lines(Path("a.jsonl"), rows)
    manifest = prepare(
        ["a.jsonl"],
        [
            {"kind": "annotator", "path": "own.py:Seen"},
            {"kind": "mapper", "path": "own.py:Upper"},
            {"kind": "annotator", "path": "own.py:Seen", "name": "again"},
            {"kind": "python", "path": "own.py:Few"},
        ],
    )
    found = {row["id"]: row for row in read_files(Path("data"), "documents").to_pylist()}
    assert sorted(found) == [row["id"] for row in rows[:6]]
    for number, row in enumerate(rows[:6]):
        kept = found[row["id"]]
        upper = row["text"].upper() if number % 2 else row["text"]
        assert (kept["text"], kept["upper.changed"]) == (upper, bool(number % 2))
        assert (kept["seen.number"], kept["seen.half"], kept["seen.even"]) == (
            number,
            number / 2,
            number % 2 == 0,
        )
        seen = json.loads(kept["seen.all"])
        fields = {"number": number, "language": "mine", "tags": [number, "x"]}
        assert seen["fields"] == {name: repr(value) for name, value in fields.items()}
        own = {name: row[name] for name in ("id", "url", "date", "text")}
        assert {name: seen[name] for name in own} == own
        assert (seen["file"], seen["language"]) == ("a.jsonl", kept["language"])
        assert (seen["offset"], seen["measured"]) == (kept["offset"], {})
        again = json.loads(kept["again.all"])
        assert again["text"] == upper
        assert set(again["measured"]) == {
            *(f"seen.{name}" for name in ("all", "number", "half", "even")),
            "upper.changed",
        }
    schema = read_files(Path("data"), "documents").schema
    names = [f"seen.{name}" for name in ("all", "number", "half", "even")]
    kinds = [pa.large_string(), pa.int64(), pa.float64(), pa.bool_()]
    assert [schema.field(name).type for name in names] == kinds
    stages = {stage.stage: stage for stage in manifest.funnel}
    assert stages["upper"].changed == {"documents": len(rows) // 2}
    for name in ("seen", "upper", "again"):
        assert stages[name].documents_in == stages[name].documents_out == len(rows)
    assert [rule["kind"] for rule in manifest.config["data"]["rules"]] == [
        "annotator",
        "mapper",
        "annotator",
        "python",
    ]
    shown = explain_url(CrawlConfig.model_validate(config_of()), "http://a.org/3")
    steps = {name: details for page in shown for name, _, details in page.steps}
    assert "number 3, half 1.5, even False" in steps["seen"]


def test_rows_stay_beside_their_texts_in_several_languages_and_after_drops(
    in_folder: Path,
) -> None:
    rows = make_rows(30)
    for number, row in enumerate(rows):
        row["number"] = number
        if number % 3 == 0:
            row["text"] = f"{GERMAN * 6} {number}." if number % 2 else f"{GERMAN} {number}."
    write_lines(Path("a.jsonl"), rows)
    short = {"kind": "gopher_quality", "min_words": 30}
    config = build_tiny_config(
        "data",
        ["a.jsonl"],
        rules=[short, {"kind": "annotator", "path": "own.py:Seen"}],
        language={"languages": ["en", "de"]},
        deduplicate={"minhash": {"kind": "none"}},
    )
    prepare_dataset(config, until="documents")
    found = read_files(Path("data"), "documents").to_pylist()
    by_id = {row["id"]: row for row in rows}
    assert {row["language"] for row in found} == {"en", "de"}
    assert 10 < len(found) < 30
    for row in found:
        seen = json.loads(row["seen.all"])
        assert row["seen.number"] == by_id[row["id"]]["number"]
        assert (seen["id"], seen["text"]) == (row["id"], row["text"])
        assert seen["measured"]["gopher_quality.words"] == row["gopher_quality.words"]


def config_of() -> dict[str, Any]:
    return {"folder": "data", "inputs": ["a.jsonl"]}


def test_times_and_nulls_of_parquet_reach_the_code_as_python_has_them(in_folder: Path) -> None:
    rows = [row for row in make_rows(6) if len(row["text"]) > 50]
    moment = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
    for row in rows:
        row |= {"seen": moment, "number": None, "place": {"x": 1.5}}
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    prepare(["a.parquet"], [{"kind": "annotator", "path": "own.py:Seen"}])
    for row in read_files(Path("data"), "documents").to_pylist():
        seen = json.loads(row["seen.all"])
        assert set(seen["fields"]) == {"seen", "place"}
        assert seen["fields"]["place"] == "{'x': 1.5}"
        assert seen["fields"]["seen"].startswith("datetime.datetime(2024, 5, 1, 0, 0, tzinfo=")
        assert row["seen.number"] is None


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("annotator", "return {'a': 'many'}", "'many' is not int. The columns are a (int)"),
        ("annotator", "return {'b': 1}", "one with b, but its columns are a (int)"),
        ("annotator", "return {'a': 1 / 0}", "ZeroDivisionError: division by zero, line"),
        ("annotator", "return {'a': True}", "True is not int"),
        ("mapper", "return ' '", "returned ' ' for the document that begins 'A document.'"),
        ("mapper", "return None", "returned None for the document"),
        ("mapper", "return '\\ud800'", "UnicodeEncodeError"),
        ("mapper", "return document.nothing", "AttributeError"),
    ],
)
def test_an_error_names_the_code_the_value_and_the_rule(
    in_folder: Path, kind: str, body: str, message: str
) -> None:
    method = "annotate" if kind == "annotator" else "map_text"
    base = "PythonAnnotator" if kind == "annotator" else "PythonMapper"
    Path("bad.py").write_text(
        OWN.partition("class ")[0]
        + f"class Bad({base}):\n    def list_columns(self):\n        return {{'a': int}}\n\n"
        + f"    def {method}(self, document):\n        {body}\n"
    )
    loaded: LoadedAnnotator | LoadedMapper = (
        LoadedAnnotator(AnnotatorConfig(path="bad.py:Bad"))
        if kind == "annotator"
        else LoadedMapper(MapperConfig(path="bad.py:Bad"))
    )
    with pytest.raises(DataError) as caught:
        loaded.apply(DocumentBatch(["A document."], WordSplitters()))
    assert message in str(caught.value)
    assert "bad.py:Bad" in str(caught.value)


def test_columns_without_a_type_are_refused_before_any_document(in_folder: Path) -> None:
    for columns in ("{}", "{'a': list}", "{'': int}", "1 / 0"):
        source = OWN.replace('{"all": str, "number": int, "half": float, "even": bool}', columns)
        Path("bad.py").write_text(source)
        with pytest.raises(LlmsysError, match="list_columns"):
            load_python_annotator(AnnotatorConfig(path="bad.py:Seen"))


def test_a_mapper_of_markdown_is_refused_with_the_config(in_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.extract\.format=markdown"):
        CrawlConfig.model_validate(
            {
                "extract": {"kind": "article", "format": "markdown"},
                "rules": [{"kind": "mapper", "path": "own.py:Upper"}],
            }
        )


def test_the_templates_and_their_kits_agree() -> None:
    document = DocumentRow("A text.", fields={"source": "book", "title": "One"})
    check_python_annotator(Origin(), document, {"source": "book", "is_https": False})
    with pytest.raises(AssertionError, match="not"):
        check_python_annotator(Origin(), document, {"source": "web", "is_https": False})
    check_python_mapper(Titled(), document, "One\n\nA text.")
    with pytest.raises(AssertionError, match="the text becomes"):
        check_python_mapper(Titled(), document, "A text.")
    with pytest.raises(ConfigError, match="default"):
        load_python_annotator(
            AnnotatorConfig(
                path="launch/commands/templates/annotator.py:Origin", options={"default": 5}
            )
        )
