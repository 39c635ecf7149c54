"""An extractor of the user's own: its texts, its fingerprint, and its mistakes."""

from pathlib import Path

import pytest

from llmsys.config.cleaning import PythonExtractorConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.extract.extractor import build_extractor
from llmsys.data_pipeline.graph.resource_files import list_extractor_versions
from llmsys.errors import ConfigError, DataError
from llmsys.launch.commands.templates.extractor import Paragraphs
from tests.helpers.paths import ROOT

TEMPLATE = (ROOT / "launch/commands/templates/extractor.py").read_text()
PAGE = b"<p>A long paragraph.</p><p>No</p>"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TEMPLATE)
    return tmp_path / "own.py"


def test_a_text_follows_from_the_options_and_the_present_source(own: Path) -> None:
    config = PythonExtractorConfig(path=f"{own}:Paragraphs", options={"min_characters": 5})
    extract, data = build_extractor(config), CrawlConfig(extract=config)
    assert (
        extract(PAGE) == Paragraphs(min_characters=5).extract(PAGE.decode()) == "A long paragraph."
    )
    before = list_extractor_versions(data)
    own.write_text(TEMPLATE.replace("return ", "return 'now ' + ", 1))
    assert build_extractor(config)(PAGE) == "now A long paragraph."
    assert list_extractor_versions(data) != before


def test_an_error_names_the_page_and_the_line(own: Path) -> None:
    own.write_text(TEMPLATE.replace("return ", "return 3 or ", 1))
    config = PythonExtractorConfig(path=f"{own}:Paragraphs")
    with pytest.raises(
        DataError,
        match=r"own\.py:Paragraphs failed on a page that begins b'<p>A .* returned int, not str",
    ):
        build_extractor(config)(PAGE)
    with pytest.raises(
        ConfigError, match=r"min_character: unknown key\. Did you mean min_characters\?"
    ):
        list_extractor_versions(
            CrawlConfig(extract=config.model_copy(update={"options": {"min_character": 1}}))
        )
