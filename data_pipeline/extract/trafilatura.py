"""Trafilatura's main content, for those who want the texts of FineWeb.

Reads HTML as UTF-8, gives text. Comments of readers are left out, as in FineWeb; its memory of repeated texts, which
makes a text depend on the pages before it, stays off.
"""

from importlib import metadata

from data_pipeline.extract.extractor import Extractor
from llmsys.config.extraction import TrafilaturaExtractorConfig
from llmsys.errors import ConfigError


def build_trafilatura_extractor(config: TrafilaturaExtractorConfig) -> Extractor:
    """What makes text of a page with these settings; ConfigError when trafilatura is not installed."""
    get_trafilatura_version()
    from trafilatura import extract

    precise, complete = config.favor == "precision", config.favor == "recall"

    def extract_text(html: bytes) -> str:
        text = extract(
            html.decode(), favor_precision=precise, favor_recall=complete, include_comments=False, deduplicate=False
        )
        return text or ""

    return extract_text


def get_trafilatura_version() -> str:
    """Return the version that is installed, as pip writes it."""
    try:
        return f"trafilatura=={metadata.version('trafilatura')}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "data.extract.kind=trafilatura needs the package trafilatura, which is not installed. "
            "Install it with: pip install 'llmsys[trafilatura]', or set data.extract.kind=article."
        ) from None
