"""Read pages whose main content is labelled by hand, by page type and language.

Reads `tests/data/labelled_pages/labels.yaml`, pages of `tests/data`, and pages that are not in the
repository from folders and crawl files that the caller names.

A label is CSS selectors: elements that are the main content, elements inside them that are not, and
elements that stand for a formula in TeX (its `alt`, else its text). They were written by reading
each template. The marked text is made by lexbor and a few expressions, without `extract/`.

Invariants:
- A page is used only if its bytes have the SHA-256 of its label.
- A family of templates is in one part as a whole: `chosen-on`, which rules may be chosen on, or
  `held-out`, which is only reported.
"""

import hashlib
import html
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from selectolax.lexbor import LexborHTMLParser, LexborNode

from llmsys.config.cleaning import ArticleExtractorConfig
from llmsys.data_pipeline.readers.page_reader import read_pages

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data"
LABELS = FOLDER / "labelled_pages" / "labels.yaml"
# In the repository: pages that were written for the test, and the sample crawl.
SHIPPED = (
    FOLDER / "labelled_pages" / "written",
    *sorted((FOLDER / "sample_crawl").glob("*.warc.gz")),
)
PARTS = ("chosen-on", "held-out")
SEED = 20261201  # of the draw of families into parts

_UNREAD = "script,style,noscript,template,svg,iframe,select,button,input,textarea"
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_BREAK = re.compile(
    r"<br>|</?(?:address|article|aside|blockquote|caption|dd|details|div|dl|dt|fieldset|figcaption|"
    r"figure|footer|form|h[1-6]|header|hr|legend|li|main|ol|p|pre|section|summary|table|tbody|td|"
    r"tfoot|th|thead|tr|ul)\b[^>]*>"
)
_TAG = re.compile(r"<[^>]*>")
_DISPLAY_STYLE = re.compile(r"^\s*\{\\(?:display|text)style\b(.*)\}\s*$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LabelledPage:
    """A page and the selectors of its template.

    Attributes:
        template: key in the file of labels.
        family: templates of one family, such as DocBook's, are in one part.
        page_type: `documentation`, `forum`, `product`, `listing` or `mathematics`.
        language: code of the language that most of the page is in.
        name: path below a folder, or URL in a crawl file.
        sha256: digest of the page's bytes.
        keep: selectors of the main content.
        drop: selectors of what is no content inside it.
        formulas: selectors of elements that stand for a formula in TeX.
    """

    template: str
    family: str
    page_type: str
    language: str
    name: str
    sha256: str
    keep: str
    drop: str
    formulas: str


def read_labels(path: Path = LABELS) -> list[LabelledPage]:
    """Read the labels.

    Args:
        path: The file of labels.

    Returns:
        Its pages, in the order of the file.
    """
    templates = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        LabelledPage(
            template=template,
            family=label.get("family", template),
            page_type=label["type"],
            language=language,
            name=name,
            sha256=sha256,
            keep=",".join(label["keep"]),
            drop=",".join(label.get("drop", [])),
            formulas=",".join(label.get("formulas", [])),
        )
        for template, label in templates.items()
        for language, name, sha256 in label["pages"]
    ]


def assign_parts(pages: Iterable[LabelledPage]) -> dict[str, str]:
    """Assign families to parts: those of each type in turn, in an order that `SEED` draws.

    Args:
        pages: All labelled pages; a family counts for the type of its first page.

    Returns:
        The part of each family.
    """
    families: dict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for page in pages:
        if page.family not in seen:
            families[page.page_type].append(page.family)
            seen.add(page.family)
    parts: dict[str, str] = {}
    for page_type, names in sorted(families.items()):
        names.sort()
        random.Random(f"{SEED} {page_type}").shuffle(names)
        for place, name in enumerate(names):
            parts[name] = PARTS[place % len(PARTS)]
    return parts


def collect_pages(pages: Sequence[LabelledPage], places: Iterable[Path]) -> dict[str, bytes]:
    """Read the labelled pages that are found.

    Args:
        pages: The labels.
        places: Folders that names of pages are paths below, and crawl files.

    Returns:
        The page in UTF-8 by the digest of its bytes; pages that are not found are missing.

    Raises:
        FileNotFoundError: A place does not exist.
    """
    wanted = {page.sha256 for page in pages}
    found: dict[str, bytes] = {}
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"{place} does not exist: name a folder or a crawl file")
        files = [place / page.name for page in pages] if place.is_dir() else []
        in_files = ((file.read_bytes(), "utf-8") for file in files if file.is_file())
        for payload, charset in in_files if place.is_dir() else _iter_crawl(place):
            digest = hashlib.sha256(payload).hexdigest()
            if digest in wanted:
                found[digest] = payload.decode(charset, "replace").encode()
    return found


def _iter_crawl(file: Path) -> Iterator[tuple[bytes, str]]:
    """Yield the bytes and the charset of each page of a crawl file."""
    limit = ArticleExtractorConfig().max_page_bytes
    for batch in read_pages(str(file), max_page_bytes=limit):
        payloads = batch.pages.column("payload").to_pylist()
        yield from zip(payloads, batch.pages.column("charset").to_pylist(), strict=True)


def read_marked_text(page: LabelledPage, content: bytes) -> str:
    """Return the text that the label of a page marks.

    Args:
        page: The label.
        content: The page in UTF-8.

    Returns:
        A line per block.

    Raises:
        ValueError: The selectors find no element.
    """
    tree = LexborHTMLParser(content)
    for element in tree.css(page.formulas) if page.formulas else []:
        element.replace_with(f" {_read_formula(element)} ")
    for element in tree.css(f"{_UNREAD},{page.drop}" if page.drop else _UNREAD):
        element.decompose()
    kept = tree.css(page.keep)
    if not kept:
        raise ValueError(f"{page.name}: no element matches {page.keep} of {page.template}")
    outer = [element for element in kept if not _is_inside(element, kept)]
    return "\n".join(map(_format_element, outer))


def _read_formula(element: LexborNode) -> str:
    """Return the TeX of a formula: its `alt`, else its text."""
    tex = element.attributes.get("alt") or element.text() or ""
    styled = _DISPLAY_STYLE.match(tex)
    return styled[1] if styled else tex


def _is_inside(element: LexborNode, others: Sequence[LexborNode]) -> bool:
    """Return whether an element is inside one of others."""
    around = element.parent
    while around is not None:
        if around in others:
            return True
        around = around.parent
    return False


def _format_element(element: LexborNode) -> str:
    """Return the text of an element, a line per block."""
    text = _COMMENT.sub("", element.html or "")
    text = html.unescape(_TAG.sub("", _BREAK.sub("\n", text)))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(filter(None, lines))
