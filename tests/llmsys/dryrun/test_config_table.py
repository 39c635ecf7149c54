"""The table of all configs takes the place between two marks of a page, and no other."""

from pathlib import Path

import pytest

from llmsys.dryrun.config_table import BEGIN, END, replace_table
from llmsys.errors import ConfigError


def test_a_table_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n| old |\n{END}\nafter\n")
    assert replace_table(page, "| new |") == f"before\n{BEGIN}\n\n| new |\n\n{END}\nafter\n"
    assert "| old |" in page.read_text()


@pytest.mark.parametrize(
    "text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"]
)
def test_a_page_without_one_place_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ConfigError, match="has no place for the table"):
        replace_table(tmp_path / "page.md", "| new |")
