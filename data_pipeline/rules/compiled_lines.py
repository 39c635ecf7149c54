"""Count lines and paragraphs by the compiled core, as `datatrove_repetition` and `gopher_quality`
do in Python.

Invariants:
- Numbers are those of the Python functions.
"""

from collections.abc import Sequence

import numpy as np

from llmsys.data_pipeline.core.native import NativeCore
from llmsys.data_pipeline.text.compiled_words import Counts, get_address, join_texts


def count_repeated_lines(core: NativeCore, texts: Sequence[str]) -> Counts:
    """Count the paragraphs and lines of texts, and those that are repeated.

    Args:
        core: The compiled core.
        texts: D texts.

    Returns:
        Paragraphs, repeated paragraphs and their characters, then the same of lines; int64 of
        shape (6, D).
    """
    data, offsets = join_texts(texts)
    counts = np.zeros((6, len(texts)), np.int64)
    done = core.functions.llmsys_count_repeated_lines(
        data, get_address(offsets), len(texts), get_address(counts)
    )
    if done < 0:
        raise MemoryError("repeated lines need more memory than there is")
    return counts


def count_line_marks(core: NativeCore, texts: Sequence[str]) -> Counts:
    """Count the lines of texts, and those with a bullet or an ellipsis, in datatrove's dialect.

    Args:
        core: The compiled core.
        texts: D texts.

    Returns:
        Lines, lines with a bullet, lines with an ellipsis; int64 of shape (3, D).
    """
    data, offsets = join_texts(texts)
    counts = np.zeros((3, len(texts)), np.int64)
    core.functions.llmsys_count_line_marks(
        data, get_address(offsets), len(texts), get_address(counts)
    )
    return counts
