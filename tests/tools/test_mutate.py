"""tools/mutate.py: its bugs fit the source, and it names one that no test notices."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutate

MUTANTS = mutate.load_mutants(mutate.MUTATIONS)
FOUNDATION = ("dataset", "kernels", "storage", "vocabulary")
ROOMS = ("data", "model", "optim", "parallel", "engine", "train", "estimate")


def test_every_bug_fits_the_source_and_the_file_is_still_python(repository: Path) -> None:
    for mutant in MUTANTS:
        source = (repository / mutant.file).read_text(encoding="utf-8")
        changed = mutant.apply_to_source(source)
        if mutant.file.endswith(".py"):
            source, changed = (ast.dump(ast.parse(text)) for text in (source, changed))
        assert source != changed, mutant.title


def test_every_bug_has_its_own_title_and_tests_of_its_own_package(repository: Path) -> None:
    assert len({mutant.title for mutant in MUTANTS}) == len(MUTANTS) >= 80
    for mutant in MUTANTS:
        parts = Path(mutant.file).parent.parts
        # What everything stands on is tested where it is used.
        if parts == ("native",):  # the compiled core has its tests with its loader
            parts = ("data_pipeline", "core")
        is_shared = parts[0] in ("data_pipeline", "tools") or parts[1] in FOUNDATION
        package = parts[: 1 if is_shared else 2]
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert path.startswith(f"tests/{'/'.join(package)}/"), mutant.title
            assert f"def {name.partition(chr(91))[0]}" in (repository / path).read_text(
                encoding="utf-8"
            ), mutant.title
    packages = {
        Path(mutant.file).parts[1] for mutant in MUTANTS if mutant.file.startswith("llmsys/")
    }
    assert packages.issuperset(ROOMS)


def test_the_list_names_every_bug_with_its_file_and_its_tests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mutate.main(["--list", "--only", "object_lock"]) == 0
    plain = capsys.readouterr().out
    assert mutate.main(["--list", "--markdown", "--only", "object_lock"]) == 0
    table = capsys.readouterr().out
    chosen = [mutant for mutant in MUTANTS if "object_lock" in mutant.file]
    assert len(plain.splitlines()) == len(chosen)
    assert len(table.splitlines()) == len(chosen) + 2
    for mutant, line, row in zip(chosen, plain.splitlines(), table.splitlines()[2:], strict=True):
        assert line == f"{mutant.file}: {mutant.title} ({' '.join(mutant.tests)})"
        cells = [
            mutant.title,
            f"`{mutant.file}`",
            "<br>".join(f"`{test}`" for test in mutant.tests),
        ]
        assert row == f"| {' | '.join(cells)} |"


def test_a_bug_whose_text_is_gone_is_named() -> None:
    mutant = mutate.Mutant("a sum", "shop.py", "a + b", "a - b", ())
    with pytest.raises(
        mutate.MutantError, match=r"shop.py has 0 times the text 'a \+ b' of the mutant 'a sum'"
    ):
        mutant.apply_to_source("a * b")
    with pytest.raises(mutate.MutantError, match="has 2 times"):
        mutant.apply_to_source("a + b + (a + b)")


SOURCE = """
def add(a: int, b: int) -> int:
    return a + b

def is_full(count: int) -> bool:
    return count > 9
"""
TESTS = """
from pathlib import Path
from shop import add, is_full

def test_add() -> None:
    assert add(2, 1) == 3

def test_is_full() -> None:
    assert is_full(11) and not is_full(2)

def test_broken() -> None:
    raise ValueError
"""
MUTATIONS = """
- file: shop.py
  tests: [tests/test_shop.py::test_add, tests/test_shop.py::test_is_full]
  mutants:
    - {title: a difference, old: a + b, new: a - b}
    - {title: a product, old: a + b, new: a * b}
    - {title: ten is not full, old: count > 9, new: count > 10}
    - {title: an import of nothing, old: "def add", new: "import nothing\\n\\ndef add"}
- file: shop.py
  tests: [tests/test_shop.py::test_broken]
  mutants:
    - {title: a test that always fails, old: a + b, new: b + a}
"""


def test_it_tells_bugs_that_are_caught_from_those_that_are_not(tmp_path: Path) -> None:
    files = {
        "shop.py": SOURCE,
        "tests/test_shop.py": TESTS,
        "mutations.yaml": MUTATIONS,
        "pytest.ini": "[pytest]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    # In a separate process: it forks, which pytest's must not.
    program = (
        "import sys; from pathlib import Path; from tools import mutate; mutate.ROOT = "
        "Path(sys.argv[1]); mutate.MUTATIONS = mutate.ROOT / 'mutations.yaml'; mutate.PRELOADED = "
        "(); sys.exit(mutate.main(['--markdown']))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stderr
    expected = {
        "a difference": "test_add",
        "a product": "test_add",
        "ten is not full": "survived",
        "an import of nothing": "broken",
        "a test that always fails": "unsound",
    }
    table = dict(re.findall(r"^\| (.+) \| `shop.py` \| `(\w+)` \|$", found.stdout, re.MULTILINE))
    assert table == expected
    assert "2 of 5 bugs were caught." in found.stdout
    assert "survived: ten is not full (shop.py)\n  - count > 9\n  + count > 10\n" in found.stdout
    assert (tmp_path / "shop.py").read_text() == SOURCE


def test_a_bug_fits_its_source_whatever_the_line_breaks_are() -> None:
    mutant = mutate.Mutant("title", "file.py", "scale(a, b).exp() if c", "scale(a).exp() if c", ())
    call = "    scale(\n        a,\n        b,\n    )\n    .exp()\n    if c\n"
    source = f"x = (\n{call}    else d\n)\n"
    assert mutant.apply_to_source(source) == "x = (\n    scale(a).exp() if c\n    else d\n)\n"
    with pytest.raises(mutate.MutantError, match="0 times"):
        mutant.apply_to_source(source.replace("if c", "ifc"))
