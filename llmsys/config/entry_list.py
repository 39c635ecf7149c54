"""Configuration of the user's lists of words, hosts or URLs; llmsys ships none."""

from pydantic import Field

from llmsys.config.local_path import LocalPath
from llmsys.config.section import Section


class EntryListConfig(Section):
    """Entries of files and of the config. A file has one entry per line; `#` begins a comment."""

    files: tuple[LocalPath, ...] = Field(
        (),
        description="UTF-8 files with one entry per line; .gz is decompressed. Relative paths start in the working "
        "directory.",
    )
    entries: tuple[str, ...] = Field((), description="Entries given inline.")

    @property
    def is_empty(self) -> bool:
        """True when neither files nor entries are given."""
        return not self.files and not self.entries
