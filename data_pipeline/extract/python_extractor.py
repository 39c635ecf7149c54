"""Extractors of the user's own code: the class to extend, and its place in the extraction.

Limits of bytes, nodes and attributes are checked before, and the text is normalized after, as for
any extractor.

Invariants:
- A text depends on its page and the options alone.
"""

from abc import abstractmethod
from collections.abc import Callable

from llmsys.config.cleaning import PythonExtractorConfig
from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.python_code import compute_code_digest
from llmsys.config.section import Section
from llmsys.errors import DataError

_SHOWN_BYTES = 80


class PythonExtractor(Section):
    """Base class of an extractor: fields are options."""

    @abstractmethod
    def extract(self, html: str) -> str:
        """Return the text of a page: a paragraph or list item per line, blank lines between
        blocks; "" for none.
        """


def load_python_extractor(config: PythonExtractorConfig) -> PythonExtractor:
    """Run the user's code and build the extractor.

    Args:
        config: the section.

    Returns:
        The user's object.

    Raises:
        ConfigError: the class is missing or wrong, or an option is.
    """
    return load_python_object(config, PythonExtractor, "data.extract")  # type: ignore[type-abstract]


def build_python_extractor(config: PythonExtractorConfig) -> Callable[[bytes], str]:
    """Build the extractor of a section; it loads the code again when its source changes."""
    loaded: dict[str, PythonExtractor] = {}

    def extract_text(html: bytes) -> str:
        # extractors are cached by config, and a process may outlive an edit
        digest = compute_code_digest(config)
        if digest not in loaded:
            loaded.clear()
            loaded[digest] = load_python_extractor(config)
        try:
            text = loaded[digest].extract(html.decode())
            if not isinstance(text, str):
                raise TypeError(f"extract returned {type(text).__name__}, not str")
        except Exception as error:
            raise DataError(
                f"{config.path} failed on a page that begins {html[:_SHOWN_BYTES]!r}: "
                f"{describe_error(error, config.files[0])}. Correct the code."
            ) from error
        return text

    return extract_text
