"""Load the compiled core: a library in C++ that extracts text, splits words, counts n-grams and
scores languages as Python does, several times as fast.

`tools/build_native.py` builds it while the package is installed, from the folder `native/` of the
repository. Without it, or where it does not fit, Python does the same work with the same result.

Reads `llmsys_core.so` next to this file. Imports the standard library alone, because the build
imports this file.

Invariants:
- The core is used only if it was built from the present sources (in a checkout), has the expected
  functions, and knows the lexbor of the installed selectolax.
- Nothing that is stored depends on it.
"""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path

ABI = 3  # as in native/core.cpp
UNICODE_VERSION = "14.0.0"  # of native/unicode_tables.h
LIBRARY = Path(__file__).resolve().parent / "llmsys_core.so"
SOURCES = Path(__file__).resolve().parents[2] / "native"
# 0: Python, whatever is installed
SWITCH = "LLMSYS_NATIVE"

# -ffp-contract=off: a fused multiplication and addition rounds once, Python's twice.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared")

# lexbor's functions, in the order of `Lexbor` in native/lexbor.h
_LEXBOR_FUNCTIONS = (
    "lxb_html_document_create",
    "lxb_html_document_destroy",
    "lxb_html_document_clean",
    "lxb_html_document_parse",
    "lxb_html_document_body_element_noi",
    "lxb_dom_document_root",
    "lxb_dom_element_qualified_name",
    "lxb_dom_attr_qualified_name",
    "lxb_dom_node_next_noi",
    "lxb_dom_node_parent_noi",
    "lxb_dom_node_first_child_noi",
    "lxb_dom_node_tag_id_noi",
    "lxb_dom_node_type_noi",
    "lxb_dom_element_first_attribute_noi",
    "lxb_dom_element_next_attribute_noi",
    "lxb_dom_attr_value_noi",
    "lxb_dom_node_text_content",
)

# Arrays are given as addresses.
_ADDRESS = ctypes.c_void_p
_WORD_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "llmsys_describe_characters": (None, [_ADDRESS]),
    "llmsys_create_words": (
        _ADDRESS,
        [ctypes.POINTER(ctypes.c_char_p), _ADDRESS, ctypes.c_int, ctypes.c_int],
    ),
    "llmsys_renew_words": (_ADDRESS, [_ADDRESS]),
    "llmsys_free_words": (None, [_ADDRESS]),
    "llmsys_look_up_words": (
        ctypes.c_int64,
        [_ADDRESS, ctypes.c_char_p, _ADDRESS, ctypes.c_int64],
    ),
    "llmsys_left_data": (_ADDRESS, [_ADDRESS]),
    "llmsys_left_ends": (ctypes.POINTER(ctypes.c_int64), [_ADDRESS]),
    "llmsys_learn_words": (
        ctypes.c_int,
        [_ADDRESS, ctypes.c_char_p, _ADDRESS, _ADDRESS, _ADDRESS],
    ),
    "llmsys_count_words": (None, [_ADDRESS, _ADDRESS]),
    "llmsys_write_words": (None, [_ADDRESS, _ADDRESS, _ADDRESS]),
    "llmsys_write_vocabulary": (None, [_ADDRESS, ctypes.c_int32, *[_ADDRESS] * 5]),
    "llmsys_vocabulary_data": (_ADDRESS, [_ADDRESS]),
    "llmsys_vocabulary_ends": (ctypes.POINTER(ctypes.c_int64), [_ADDRESS]),
    "llmsys_find_word": (ctypes.c_int32, [_ADDRESS, ctypes.c_char_p, ctypes.c_int64]),
    "llmsys_count_lines": (ctypes.c_int, [_ADDRESS, ctypes.c_char_p, *[_ADDRESS] * 5]),
    "llmsys_count_repeated_lines": (
        ctypes.c_int,
        [ctypes.c_char_p, _ADDRESS, ctypes.c_int64, _ADDRESS],
    ),
    "llmsys_count_line_marks": (None, [ctypes.c_char_p, _ADDRESS, ctypes.c_int64, _ADDRESS]),
    "llmsys_count_top_ngrams": (
        ctypes.c_int,
        [_ADDRESS, _ADDRESS, ctypes.c_int64, *[_ADDRESS] * 3],
    ),
    "llmsys_count_repeated_ngrams": (
        ctypes.c_int,
        [_ADDRESS, _ADDRESS, ctypes.c_int64, *[_ADDRESS] * 4],
    ),
    "llmsys_score_languages": (
        ctypes.c_int,
        [_ADDRESS, ctypes.c_char_p, _ADDRESS, ctypes.c_int64, _ADDRESS, _ADDRESS],
    ),
}


def compute_source_digest(folder: Path) -> str:
    """Compute the digest of the core's sources and of how they are compiled.

    Args:
        folder: The folder `native/`.

    Returns:
        Hexadecimal digits; the library holds them too.
    """
    digest = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=16)
    for path in sorted([*folder.glob("*.h"), *folder.glob("*.cpp")]):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@dataclass
class PageCounts:
    """Pages that the compiled core extracted in this process, and that it left to Python."""

    compiled: int = 0
    left: int = 0


_pages = PageCounts()


class CoreUnavailableError(Exception):
    """The reason why Python does the work, and the next step."""


class NativeCore:
    """The functions of a loaded library.

    Args:
        path: The library.

    Raises:
        CoreUnavailableError: It is missing, cannot be loaded, or does not fit.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise CoreUnavailableError(
                "it was not built. Install a C++ compiler (apt-get install g++) and run make "
                "install again (in a checkout: rm .venv/install.state first)"
            )
        try:
            self._library = ctypes.CDLL(str(path))
            self._set_signatures()
            abi = self._library.llmsys_abi()
        except (OSError, AttributeError) as error:
            raise CoreUnavailableError(
                f"{path} cannot be loaded ({error}). Build it again"
            ) from None
        if abi != ABI:
            raise CoreUnavailableError(
                f"{path} has ABI {abi}, and this version needs {ABI}. Run make install"
            )
        if SOURCES.is_dir() and compute_source_digest(SOURCES) != self.sources:
            raise CoreUnavailableError(f"{path} was built from other sources. Run make install")
        self._connect_lexbor()

    @property
    def sources(self) -> str:
        """The digest of the sources that the library was built from."""
        return str(self._library.llmsys_sources().decode())

    @property
    def functions(self) -> ctypes.CDLL:
        """The functions of `native/core.cpp`, with their arguments declared."""
        return self._library

    def extract_articles(self, pages: Sequence[bytes]) -> list[bytes | None]:
        """Extract the main content of pages, without Python's lock.

        Args:
            pages: Valid UTF-8 without NUL, within the limits of `extract.page_limits`.

        Returns:
            For each page the text of `clean_text(extract_article(page))` as UTF-8 that is not
            brought into NFC; None for a page that is left to Python.
        """
        count = len(pages)
        addresses = (ctypes.c_char_p * count)(*pages)
        sizes = (ctypes.c_int64 * count)(*map(len, pages))
        texts = self._library.llmsys_extract_articles(addresses, sizes, count)
        if not texts:
            _pages.left += count
            return [None] * count  # no memory: Python tries, or reports it
        try:
            offsets = self._library.llmsys_offsets(texts)[: count + 1]
            left = ctypes.string_at(self._library.llmsys_left(texts), count)
            data = ctypes.string_at(self._library.llmsys_data(texts), offsets[-1])
        finally:
            self._library.llmsys_free(texts)
        num_left = sum(left)
        _pages.left += num_left
        _pages.compiled += count - num_left
        return [
            None if is_left else data[start:end]
            for is_left, start, end in zip(left, offsets, offsets[1:], strict=False)
        ]

    def _set_signatures(self) -> None:
        """Declare arguments and results; AttributeError where a function is missing."""
        handle = ctypes.c_void_p
        signatures: dict[str, tuple[object, list[object]]] = {
            "llmsys_abi": (ctypes.c_int, []),
            "llmsys_sources": (ctypes.c_char_p, []),
            "llmsys_use_lexbor": (ctypes.c_int, [ctypes.POINTER(handle), ctypes.c_int]),
            "llmsys_extract_articles": (
                handle,
                [ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_int64), ctypes.c_int64],
            ),
            "llmsys_data": (handle, [handle]),
            "llmsys_offsets": (ctypes.POINTER(ctypes.c_int64), [handle]),
            "llmsys_left": (handle, [handle]),
            "llmsys_free": (None, [handle]),
            **_WORD_FUNCTIONS,
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype = result
            function.argtypes = arguments

    def _connect_lexbor(self) -> None:
        """Give the library the addresses of lexbor's functions; selectolax holds them."""
        path = import_module("selectolax.lexbor").__file__
        try:
            lexbor = ctypes.CDLL(str(path))
            addresses = [
                ctypes.cast(getattr(lexbor, name), ctypes.c_void_p).value
                for name in _LEXBOR_FUNCTIONS
            ]
        except (OSError, AttributeError) as error:
            raise CoreUnavailableError(
                f"{path} does not have the functions of lexbor ({error}). Install the version of "
                "selectolax in constraints.txt"
            ) from None
        functions = (ctypes.c_void_p * len(addresses))(*addresses)
        if not self._library.llmsys_use_lexbor(functions, len(addresses)):
            raise CoreUnavailableError(
                f"{path} has another lexbor than the core knows. Install the version of selectolax "
                "in constraints.txt"
            )


@cache
def load_core() -> NativeCore | CoreUnavailableError:
    """Load the compiled core, once per process.

    Returns:
        The core, or the reason why there is none.
    """
    if os.environ.get(SWITCH) == "0":
        return CoreUnavailableError(f"{SWITCH}=0 turns it off")
    try:
        return NativeCore(LIBRARY)
    except CoreUnavailableError as reason:
        return reason


def count_core_pages() -> PageCounts:
    """Count the pages of this process so far.

    Returns:
        Zeros where there is no core.
    """
    return replace(_pages)


def describe_core() -> str:
    """Describe in one line which core runs.

    Returns:
        Such as `compiled core (ABI 1)`, or `Python core; the compiled one is not used: …`.
    """
    core = load_core()
    if isinstance(core, NativeCore):
        return f"compiled core (ABI {ABI})"
    return f"Python core; the compiled one is not used: {core}"
