"""Extract the main content with trafilatura, as in FineWeb.

Readers' comments are left out, as in FineWeb. Its cache of repeated texts, which makes a text depend on earlier pages,
is off.
"""

from collections.abc import Callable
from importlib import metadata

from llmsys.config.extraction import TrafilaturaExtractorConfig
from llmsys.errors import ConfigError


def build_trafilatura_extractor(config: TrafilaturaExtractorConfig) -> Callable[[bytes], str]:
    """Build the extractor with these settings.

    Raises:
        ConfigError: if trafilatura is not installed.
    """
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
    """Return the installed version.

    Returns:
        A requirement such as `trafilatura==2.0.0`.

    Raises:
        ConfigError: If trafilatura is not installed.
    """
    try:
        return f"trafilatura=={metadata.version('trafilatura')}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "data.extract.kind=trafilatura needs the package trafilatura, which is not installed. "
            "Install it with: pip install 'llmsys[trafilatura]', or set data.extract.kind=article."
        ) from None
