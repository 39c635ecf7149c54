"""The constants that are chosen anew are those of the extractor."""

from pathlib import Path

from tools.bench.choose_extraction import CONSTANTS, choose


def test_every_constant_is_tried_and_kept_where_no_page_is_better(repository: Path) -> None:
    page = b"<html><body><p>One sentence that is long enough to be a paragraph.</p></body></html>"
    assert choose([page], ["One sentence that is long enough to be a paragraph."], 1) == {}
    assert all((repository / "data_pipeline/extract" / f"{name}.py").exists() for name in CONSTANTS)
