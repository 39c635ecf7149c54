"""How the name of a file is written down when it is not UTF-8.

Reads a path as the operating system gives it, gives text that every format can hold. A byte that is not UTF-8 becomes
`%E9`, as in a URL; every other path stays as it is.
"""

import os
import re

_UNDECODED = re.compile("[\udc80-\udcff]")  # what os.fsdecode makes of a byte that is not UTF-8 (PEP 383)


def format_file_name(path: str) -> str:
    """Return a path as valid UTF-8."""
    return _UNDECODED.sub(lambda match: f"%{os.fsencode(match[0])[0]:02X}", path)
