"""The site: every page is in the menu, every link leads somewhere, and the reference covers the
code.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from llmsys.config.quality_rules import RuleConfig
from llmsys.config.run import RunConfig
from llmsys.config.section import get_kind, list_section_types
from llmsys.launch.commands.verbs import VERBS
from tests.helpers.paths import ROOT
from tools.docs import event_reference
from tools.docs.hooks import READMES, iter_pages, read_readme, resolve_path


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags for Python objects are not needed here."""


def list_menu(entries: list[Any]) -> list[str]:
    """Return the pages of a menu, in order."""
    pages: list[str] = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += list_menu(value) if isinstance(value, list) else [value]
    return pages


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The text of every page by its path below docs/."""
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)): path.read_text() for path in docs.rglob("*.md")}
    return written | dict(iter_pages())


def test_every_page_is_in_the_menu_once(pages: dict[str, str]) -> None:
    menu = list_menu(yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)["nav"])
    assert sorted(menu) == sorted(pages)


def list_anchors(text: str) -> set[str]:
    """Return the anchors of a page: explicit ones, and those that are made of headings."""
    explicit = set(re.findall(r"\{#([\w-]+)\}", text))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return explicit | {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings
    }


def test_every_link_leads_to_a_page_and_a_heading(pages: dict[str, str]) -> None:
    for path, text in pages.items():
        for target in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        ):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            found = resolve_path(PurePosixPath(path).parent / file) if file else path
            assert found in pages, f"{path}: {target}"
            assert not anchor or anchor in list_anchors(pages[found]), f"{path}: {target}"


def test_links_of_readme_files_exist() -> None:
    for path in ("README.md", *READMES):
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", (ROOT / path).read_text()):
            assert "://" in target or (ROOT / path).parent.joinpath(target).exists(), (
                f"{path}: {target}"
            )


def test_links_between_readme_files_become_links_between_pages() -> None:
    text = read_readme("llmsys/README.md")
    assert "](llmsys-train.md)" in text
    assert "](security.md)" in text
    assert "README.md)" not in text


def test_the_reference_has_every_field_verb_rule_and_event(pages: dict[str, str]) -> None:
    for name, field in RunConfig.model_fields.items():
        page = pages[f"reference/config/{name}.md"]
        for section in list_section_types(field.annotation):
            for key, own in section.model_fields.items():
                described = " ".join((own.description or "").split())[:12].replace("_", "\\_")
                assert key == "kind" or re.search(
                    rf"^\| `{key}` \|.*{re.escape(described)}", page, re.MULTILINE
                ), key
    for verb in VERBS:
        assert f"## llmsys {verb} " in pages["reference/verbs.md"]
    for rule in list_section_types(RuleConfig):
        assert f"## {get_kind(rule)} " in pages["reference/rules.md"]
    for kind in event_reference.KINDS:
        assert f"## {kind}\n" in pages["reference/events.md"]


def test_an_event_that_is_not_described_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        *event_reference.iter_event_calls(),
        event_reference.EventCall("rewind", "x.py", ("new_field",)),
    ]
    monkeypatch.setattr(event_reference, "iter_event_calls", lambda: iter(calls))
    with pytest.raises(ValueError, match="new_field"):
        event_reference.list_event_fields()


@pytest.mark.parametrize("name", ["Dockerfile", "llmsys.def"])
def test_images_copy_files_that_exist_and_install_the_pins(name: str) -> None:
    text = (ROOT / "containers" / name).read_text()
    if name == "Dockerfile":
        copied = [
            word
            for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
            for word in line.split()[:-1]
        ]
    else:
        copied = [
            line.split()[0]
            for line in text.split("%files")[1].split("%post")[0].strip().splitlines()
        ]
    assert {
        "pyproject.toml",
        "constraints.txt",
        "llmsys",
        "data_pipeline",
        "launch",
        "configs",
    } <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
    project = (ROOT / "pyproject.toml").read_text()
    assert "PIP_CONSTRAINT=constraints.txt" in text
    for extra in re.search(r"'\.\[([a-z0-9,]+)\]'", text)[1].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_dockerfile_has_known_instructions_in_a_legal_order() -> None:
    """No registry and no builder here: instructions, continuations and the order of FROM and
    ARG.
    """
    text = re.sub(
        r"^#.*\n", "", (ROOT / "containers" / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    instructions = [line.split()[0] for line in lines]
    assert set(instructions) <= {
        "FROM",
        "RUN",
        "ARG",
        "ENV",
        "WORKDIR",
        "COPY",
        "ENTRYPOINT",
        "CMD",
    }
    assert instructions[0] == "FROM"
    assert instructions.count("ENTRYPOINT") == instructions.count("CMD") == 1
    for line in lines:
        if line.startswith("RUN "):
            command = re.sub(r"\s+", " ", line.removeprefix("RUN "))
            subprocess.run(["sh", "-n", "-c", command], check=True)


def test_the_apptainer_definition_has_its_header_and_known_sections() -> None:
    text = (ROOT / "containers" / "llmsys.def").read_text()
    assert re.search(r"^Bootstrap: docker\nFrom: \S+$", text, re.MULTILINE)
    assert set(re.findall(r"^%(\w+)", text, re.MULTILINE)) == {
        "files",
        "post",
        "environment",
        "runscript",
    }
    for section in ("post", "environment", "runscript"):
        script = re.split(r"^%\w+$", text.split(f"%{section}\n")[1], flags=re.MULTILINE)[0]
        subprocess.run(["sh", "-n", "-c", script], check=True)


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="make docs installs mkdocs")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-d",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
