"""What was read, in the units of the input: HTML only where there was HTML, rows where a file is counted in rows."""

from llmsys.manifest import Manifest, Skip
from llmsys.record_place import is_counted_in_rows
from llmsys.report.markup import bytes_amount, number


def describe_input(manifest: Manifest) -> str:
    """Return how much was read: HTML that was extracted, text that came as text, or both."""
    given = manifest.read.given_text_bytes
    html = manifest.read.html_bytes - given
    if html <= 0:  # pairs have no pages at all
        return f"{bytes_amount(given or (manifest.funnel[0].bytes_in if manifest.funnel else 0))} of text"
    return f"{bytes_amount(html)} of HTML" + (f" and {bytes_amount(given)} of text" if given else "")


def describe_funnel_bytes(manifest: Manifest) -> str:
    """Return what the bytes of the funnel are of."""
    given = manifest.read.given_text_bytes
    if manifest.read.html_bytes <= given:
        return "Bytes are UTF-8 text: what was read came as text, and nothing was extracted."
    if given:
        return "Bytes are of HTML, or of text that came as such, before extraction and of UTF-8 text after it."
    return "Bytes are HTML before extraction and UTF-8 text after it."


def format_offset(skip: Skip) -> str:
    """Return where in its file something was skipped: `row 12`, or `byte 1,234`."""
    return f"{'row' if is_counted_in_rows(skip.file) else 'byte'} {number(skip.offset)}"
