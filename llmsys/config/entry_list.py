"""Lists that the user brings: words, hosts, URLs, from files and from the config itself.

Reads nothing, gives `EntryListConfig`. The project ships no list of its own.
"""

from pydantic import Field

from llmsys.config.local_path import LocalPath
from llmsys.config.section import Section


class EntryListConfig(Section):
    """Entries of files and of the config together. A file has one entry a line, and comments that begin with `#`."""

    files: tuple[LocalPath, ...] = Field(
        (), description="Files, plain or .gz, UTF-8; paths start in the working folder."
    )
    entries: tuple[str, ...] = Field((), description="Entries written here.")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is listed."""
        return not self.files and not self.entries
