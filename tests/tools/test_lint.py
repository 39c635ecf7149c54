"""tools/lint.py finds a planted violation of each of its rules, and nothing in code that keeps
them.
"""

from pathlib import Path

import pytest

from tools import lint

GOOD = '''"""Estimate the memory of a run."""

from typing import assert_never


def estimate_bytes(elements: int) -> int:
    """Return the bytes of a tensor.

    Args:
        elements: Number of its elements.

    Returns:
        Bytes in float32.
    """
    return 4 * elements


def name_kind(value: int | str) -> str:
    """Return the name of a variant."""
    match value:
        case int():
            return "int"
        case str():
            return "str"
        case unreachable:
            assert_never(unreachable)


class Plan:
    """A layout and its price."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return 1

    def __len__(self) -> int:
        return 1
'''
WITHOUT_ASSERT_NEVER = """def name_kind(value: int | str) -> str:
    match value:
        case int():
            return "int"
        case _:
            return "str"
"""


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product of two packages that import each other's function, without a violation."""
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    for package in lint.PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "llmsys" / "memory.py").write_text(GOOD)
    (tmp_path / "launch" / "plan.py").write_text("from llmsys.memory import estimate_bytes\n")
    return tmp_path


def run_lint(
    product: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["tools/lint.py"])
    return lint.main(), capsys.readouterr().out


def test_code_that_keeps_the_rules_has_no_finding(
    product: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_lint(product, capsys, monkeypatch) == (0, "")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("LS001", "def memory_bytes() -> int:\n    return 1\n"),
        ("LS002", "def priced(run: int) -> int:\n    return run\n"),
        ("LS002", "class Plan:\n    def kept(self) -> int:\n        return 1\n"),
        ("LS003", "def get_price_of(run: int) -> int:\n    return run\n"),
        ("LS003", "async def read_byte_at(place: int) -> int:\n    return place\n"),
        ("LS004", '"""What a run costs."""\n'),
        ("LS004", 'def estimate_price() -> int:\n    """How much it costs."""\n    return 1\n'),
        ("LS006", WITHOUT_ASSERT_NEVER),
        (
            "LS006",
            WITHOUT_ASSERT_NEVER.replace("int()", '"adamw"').replace(
                "match value", "match value.kind"
            ),
        ),
    ],
)
def test_a_planted_violation_is_found_at_its_file(
    code: str,
    text: str,
    product: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (product / "data_pipeline" / "planted.py").write_text(text)
    status, output = run_lint(product, capsys, monkeypatch)
    assert status == 1
    first, *rest = output.splitlines()
    assert first.startswith("data_pipeline/planted.py:")
    assert f" {code} " in first
    assert rest == ["1 findings, 0 warnings. The rules are in CONTRIBUTING.md."]


@pytest.mark.parametrize(
    ("lines", "is_long"),
    [
        (["x = 1"] * 500, False),
        (["x = 1"] * 501, True),
        (["def run() -> None:", *["    x = 1"] * 80], False),
        (["def run() -> None:", *["    x = 1"] * 81], True),
        # Reasons and documentation are free.
        (
            [
                "def run() -> None:",
                '    """Run.',
                "",
                *["    More."] * 50,
                '    """',
                *["    # why", "", "    x = 1"] * 80,
            ],
            False,
        ),
    ],
)
def test_a_long_file_or_function_is_a_warning_in_which_docstrings_and_comments_are_free(
    lines: list[str],
    is_long: bool,
    product: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (product / "data_pipeline" / "planted.py").write_text("\n".join(lines) + "\n")
    status, output = run_lint(product, capsys, monkeypatch)
    assert status == 0
    assert ("LS007" in output) == is_long


@pytest.mark.parametrize("section", ["Args:", "Returns:"])
def test_a_function_that_another_package_imports_needs_its_sections(
    section: str, product: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (product / "llmsys" / "memory.py").write_text(GOOD.replace(section, "Also:"))
    status, output = run_lint(product, capsys, monkeypatch)
    assert status == 1
    assert (
        f"LS005 `estimate_bytes` is used by another package and has no `{section}` section."
        in output
    )


def test_only_the_named_files_are_reported(
    product: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (product / "launch" / "planted.py").write_text("def priced() -> None: ...\n")
    monkeypatch.setattr("sys.argv", ["tools/lint.py", str(product / "llmsys" / "memory.py")])
    assert lint.main() == 0
    monkeypatch.setattr("sys.argv", ["tools/lint.py", str(product / "launch" / "planted.py")])
    assert lint.main() == 1
    assert "LS002 `priced` is a lone participle" in capsys.readouterr().out
