"""plotly.js for pages: packed as text, so that a page takes 1.5 MB instead of 4.9 MB.

Reads the package plotly. Writes the packed text into the cache folder, because packing takes
seconds.
"""

import base64
import hashlib
import logging
import lzma
from functools import cache
from typing import NamedTuple

from llmsys.storage.local_files import get_cache_folder, write_bytes_atomically

log = logging.getLogger(__name__)
# unpack.js has these settings.
_FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 6, "lc": 3, "lp": 0, "pb": 0, "dict_size": 1 << 23}]


class PackedScript(NamedTuple):
    """A script as text that unpack.js reads.

    Attributes:
        text: base 85 of a raw LZMA stream, without the character `<`.
        size: bytes of the script.
        digest: SHA-256 of the script in base 64, for the policy of a page.
    """

    text: str
    size: int
    digest: str


@cache
def load_packed_plotly() -> PackedScript:
    """Return plotly.js, packed.

    Returns:
        The script; equal for a version of plotly.
    """
    # 5 MB of text; nobody else on the command line needs it
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().encode()
    digest = hashlib.sha256(script)
    file = get_cache_folder() / f"plotly-{digest.hexdigest()[:16]}.b85"
    try:
        text = file.read_text("ascii")
        is_whole = text.endswith("\n")
    except OSError:
        is_whole = False
    if not is_whole:
        text = pack_script(script) + "\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(file, text.encode())
        except OSError as error:
            log.warning(
                "%s cannot be written (%s), so every command that writes a page packs plotly.js "
                "again",
                file,
                error,
            )
    return PackedScript(text.strip(), len(script), base64.b64encode(digest.digest()).decode())


def pack_script(script: bytes) -> str:
    """Return a script as text for unpack.js.

    Args:
        script: any bytes.

    Returns:
        Base 85 with `,` for `<`, so that no tag can end in it.
    """
    packed = lzma.compress(script, format=lzma.FORMAT_RAW, filters=_FILTERS)
    return base64.b85encode(packed, pad=True).decode().replace("<", ",")
