"""Format file names that are not valid UTF-8."""

import os
import re

_UNDECODED = re.compile("[\udc80-\udcff]")  # os.fsdecode's surrogates for bytes that are not UTF-8 (PEP 383)


def format_file_name(path: str) -> str:
    """Return a path as valid UTF-8 text: a byte that is not UTF-8 becomes `%E9`, as in a URL."""
    return _UNDECODED.sub(lambda match: f"%{os.fsencode(match[0])[0]:02X}", path)
