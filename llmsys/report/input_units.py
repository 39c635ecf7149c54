"""Describe the input of a dataset in its own units: HTML only where there was HTML, rows where a file counts rows."""

from llmsys.manifest import Manifest, SkippedInput
from llmsys.record_location import is_counted_in_rows
from llmsys.report.html_markup import format_bytes, format_number


def describe_input(manifest: Manifest) -> str:
    """Return the amount of input: HTML that was extracted, text that came as text, or both."""
    given = manifest.read.given_text_bytes
    html = manifest.read.html_bytes - given
    if html <= 0:  # pairs have no pages at all
        return f"{format_bytes(given or (manifest.funnel[0].bytes_in if manifest.funnel else 0))} of text"
    return f"{format_bytes(html)} of HTML" + (f" and {format_bytes(given)} of text" if given else "")


def describe_funnel_bytes(manifest: Manifest) -> str:
    """Return a sentence on the unit of the funnel's bytes."""
    given = manifest.read.given_text_bytes
    if manifest.read.html_bytes <= given:
        return "Bytes are UTF-8 text: the input was text, so nothing was extracted."
    if given:
        return "Bytes are HTML (or text, for text input) before extraction and UTF-8 text after it."
    return "Bytes are HTML before extraction and UTF-8 text after it."


def format_offset(skip: SkippedInput) -> str:
    """Return the location of a skipped record in its file: `row 12`, or `byte 1,234`."""
    return f"{'row' if is_counted_in_rows(skip.file) else 'byte'} {format_number(skip.offset)}"
