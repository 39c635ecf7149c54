"""MkDocs hook that adds generated pages: the reference, and the README of each package.

Reads the code and the README files of the checkout; writes nothing in docs/.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from tools.docs import (  # noqa: E402
    api_reference,
    combination_reference,
    config_reference,
    event_reference,
    format_reference,
    json_reference,
    rule_reference,
    verb_reference,
)

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

# Packages with a README, in the order of the site's menu.
READMES = (
    "configs/README.md",
    "configs/model/README.md",
    "configs/recipes/README.md",
    "data_pipeline/README.md",
    "llmsys/README.md",
    "llmsys/model/README.md",
    "llmsys/data/README.md",
    "llmsys/optim/README.md",
    "llmsys/parallel/README.md",
    "llmsys/engine/README.md",
    "llmsys/train/README.md",
    "llmsys/estimate/README.md",
    "llmsys/estimate/published_errors.md",
    "llmsys/dryrun/README.md",
    "llmsys/doctor/README.md",
    "llmsys/ablation/README.md",
    "launch/README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
)


def to_page(path: str) -> str:
    """Return the page of a README: `llmsys/train/README.md` is `in-depth/llmsys-train.md`."""
    stem = path.removesuffix("/README.md").removesuffix(".md")
    return f"in-depth/{stem.replace('/', '-').lower()}.md"


def read_readme(path: str) -> str:
    """Return a README with its links pointing to pages; links to files that are no page become
    their names. Links to pages of docs/ stay links.
    """
    folder = PurePosixPath(path).parent

    def rewrite_link(match: re.Match[str]) -> str:
        title, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        file, mark, anchor = target.partition("#")
        found = resolve_path(folder / file)
        if found.startswith("docs/"):
            return f"[{title}](../{found.removeprefix('docs/')}{mark}{anchor})"
        return (
            f"[{title}]({to_page(found).removeprefix('in-depth/')}{mark}{anchor})"
            if found in READMES
            else title
        )

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", rewrite_link, (ROOT / path).read_text())


def resolve_path(path: PurePosixPath) -> str:
    """Return a path without `..`; a folder is that of its README."""
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    found = "/".join(parts)
    return f"{found}/README.md" if (ROOT / found).is_dir() else found


def iter_pages() -> Iterator[tuple[str, str]]:
    """Yield the path below docs/ and the text of each generated page."""
    yield from config_reference.iter_pages()
    yield "reference/verbs.md", verb_reference.format_page()
    yield "reference/combinations.md", combination_reference.format_page()
    yield "reference/rules.md", rule_reference.format_page()
    yield "reference/events.md", event_reference.format_page()
    yield "reference/formats.md", format_reference.format_page()
    yield "reference/json.md", json_reference.format_page()
    yield "reference/python.md", api_reference.format_page()
    for path in READMES:
        yield to_page(path), read_readme(path)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages to those of docs/."""
    from mkdocs.structure.files import File

    for path, text in (*iter_pages(), *json_reference.iter_schemas()):
        files.append(File.generated(config, path, content=text))
    return files
