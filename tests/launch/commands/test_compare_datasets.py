"""`llmsys prepare --compare` and `llmsys inspect --compare`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.events import read_events
from llmsys.launch.commands.prepare import QUARANTINED
from llmsys.launch.main import main
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl


@pytest.fixture(autouse=True)
def crawl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_crawl(Path("crawl"))


def write_config(name: str, **data: Any) -> str:
    config = build_tiny_config(Path(name), ["crawl/*.warc.gz"], **data)
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", include={"data", "tokenizer"})))
    return str(path)


def test_configs_are_prepared_from_one_extraction_and_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loose = write_config("loose", rules=[])
    strict = write_config("strict", rules=[{"kind": "gopher_quality", "min_words": 190}])
    assert main(["prepare", loose, "--compare", strict, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    [group] = found["sides"][0]["groups"]
    assert (group["rule"], group["test"]) == ("gopher_quality", "words")
    assert group["documents"] > 0
    assert found["sides"][1]["groups"] == []
    # nothing was extracted twice
    stages = [
        event["stage"] for event in read_events(Path("strict/events.jsonl")) if event.get("stage")
    ]
    assert "extract" not in stages
    assert not list(Path("strict/tokens").glob("*.arrow"))
    assert main(["inspect", "loose", "--compare", "strict"]) == 0
    printed = capsys.readouterr().out
    assert f"{group['documents']:,} of " in printed
    assert "loose only; strict dropped them by\n  gopher_quality (words)" in printed


def test_inputs_in_quarantine_are_told_with_their_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = {"strict": [{"task": "extract/crawl-1", "message": "no memory"}]}
    monkeypatch.setattr(
        "llmsys.data_pipeline.graph.quarantine.read_quarantine",
        lambda folder: given_up.get(folder.name, []),
    )
    loose = write_config("loose", rules=[])
    strict = write_config("strict", rules=[{"kind": "gopher_quality", "min_words": 190}])
    assert main(["prepare", loose, "--compare", strict]) == QUARANTINED
    assert "in quarantine: task extract/crawl-1: no memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folder": "loose"}, "have the same data.folder=loose"),
        ({"folder": "s3://bucket/data"}, "has a dataset in object storage"),
        ({"kind": "mixture", "sources": [{"folder": "loose"}]}, "has data.kind=mixture"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_is_prepared(
    capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    first = write_config("loose", rules=[])
    Path("other.yaml").write_text(
        yaml.safe_dump({"data": change if "kind" in change else {"inputs": ["crawl/*"]} | change})
    )
    assert main(["prepare", first, "--compare", "other.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("loose").exists()
