"""`llmsys doctor core` says which core prepares data, and whether its texts are Python's."""

import json
from pathlib import Path

import pytest

from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from llmsys.data_pipeline.inspection import compare_cores as module
from llmsys.data_pipeline.inspection.compare_cores import compare_cores
from llmsys.launch.main import main
from tests.helpers.native_core import build_core, needs_compiler
from tests.helpers.stage_digest import ROOT

SHARD = str(ROOT / "tests" / "data" / "sample_crawl" / "shard-00001.warc.gz")


@needs_compiler
def test_texts_of_the_core_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = build_core(tmp_path)
    monkeypatch.setattr(module, "load_core", lambda: core)
    monkeypatch.setattr(module, "describe_core", lambda: "compiled core (ABI 1)")
    found = compare_cores([SHARD])
    assert (found.different, found.left) == (0, 0)
    assert found.pages > 200
    assert f"{found.pages} pages, 0 with another text than Python's, 0 left" in found.to_text()

    def extract(pages: list[bytes]) -> list[bytes | None]:
        return [b"another text", None, *NativeCore.extract_articles(core, pages[2:])]

    monkeypatch.setattr(core, "extract_articles", extract)
    found = compare_cores([SHARD])
    assert (found.different, found.left) == (1, 1)


def test_without_a_core_the_reason_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "load_core", lambda: CoreUnavailableError("off"))
    monkeypatch.setattr(module, "describe_core", lambda: "Python core; it is off")
    monkeypatch.setattr("llmsys.launch.commands.demo.list_sample_shards", lambda: [SHARD])
    assert main(["doctor", "core"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Python core; it is off"
    assert second.split(" pages in ")[0].isdigit()
    assert main(["doctor", "core", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled_seconds"] is None


def test_the_check_takes_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "core", "train/demo"]) == 2
    assert "doctor core reads the sample crawl, not train/demo. Leave it out." in (
        capsys.readouterr().err
    )
