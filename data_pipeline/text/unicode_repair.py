"""Repair Unicode in texts with ftfy, and count the changed documents and lines.

Equal to `ftfy.fix_text` under datatrove's settings. ftfy is called only for lines that contain
something it could change. The result depends on the text alone.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from llmsys.config.cleaning import FtfyRepairConfig, NfcNormalizationConfig

# Characters that ftfy changes in any context: controls of ASCII and Latin-1, lone surrogates,
# interlinear annotation marks, deprecated Arabic controls, byte order marks.
_ALWAYS = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\u206a-\u206f\ufff9-\ufffc\ufeff]"
)  # fmt: skip
_LONGEST_LINE = 1_000_000  # characters; ftfy takes longer lines in pieces


class RepairResult(NamedTuple):
    """Texts, and the number of changed lines of each."""

    texts: pa.Array
    lines: np.ndarray[tuple[int], np.dtype[np.int64]]

    @property
    def changes(self) -> dict[str, int]:
        """Counts of repaired documents and lines, for the funnel."""
        return {
            "documents repaired": int(np.count_nonzero(self.lines)),
            "lines repaired": int(self.lines.sum()),
        }


def repair_texts(
    texts: pa.Array, config: FtfyRepairConfig | NfcNormalizationConfig
) -> RepairResult:
    """Repair a column of texts.

    Args:
        texts: string or large_string without nulls.
        config: ftfy with its options, or NFC normalization alone.

    Returns:
        The texts, and the number of changed lines per text.
    """
    found = [repair_text(text, config) for text in texts.to_pylist()]
    lines = np.fromiter((count for _, count in found), np.int64, len(found))
    return RepairResult(
        pa.array([text for text, _ in found], texts.type) if lines.any() else texts, lines
    )


def repair_text(text: str, config: FtfyRepairConfig | NfcNormalizationConfig) -> tuple[str, int]:
    """Repair the encoding of a text.

    Args:
        text: The text.
        config: The section `data.unicode`.

    Returns:
        The repaired text, and the number of its lines that changed.
    """
    entities = (
        isinstance(config, FtfyRepairConfig) and config.html_entities == "auto" and "&" in text
    )
    mends = isinstance(config, FtfyRepairConfig) and not (
        text.isascii() and not entities and not _ALWAYS.search(text)
    )
    lines = text.split("\n")
    mended = list(_repair_lines(lines, entities)) if mends else lines
    if (
        isinstance(config, NfcNormalizationConfig) or config.normalization == "NFC"
    ) and not text.isascii():
        mended = unicodedata.normalize("NFC", "\n".join(mended)).split("\n")
    if mended == lines:
        return text, 0
    return "\n".join(mended), sum(old != new for old, new in zip(lines, mended, strict=False))


def _repair_lines(lines: list[str], entities: bool) -> Iterator[str]:
    """Repair each line; entities are decoded until a line has a `<`, because from there on the
    text may be HTML.
    """
    from ftfy import fix_text
    from ftfy.badness import is_bad

    for line in lines:
        is_long = len(line) > _LONGEST_LINE  # ftfy itself searches each of its pieces for a `<`
        decodes = entities and (is_long or "<" not in line)
        entities = entities and "<" not in line
        suspect = (
            (decodes and "&" in line)
            or is_long
            or _ALWAYS.search(line)
            or (not line.isascii() and is_bad(line))
        )
        yield fix_text(line, _build_ftfy_config(decodes)) if suspect else line


@lru_cache(maxsize=2)
def _build_ftfy_config(entities: bool) -> Any:
    from ftfy import TextFixerConfig

    return TextFixerConfig(
        unescape_html="auto" if entities else False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        normalization=None,
        explain=False,
    )
