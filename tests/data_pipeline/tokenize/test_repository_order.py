"""Files of a repository are next to each other in the token files, imported ones first."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.tokenize.repository_order import find_imports, order_files
from llmsys.errors import DataError
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, write_sentences

ORDER = {"kind": "repository", "repository_field": "repo", "path_field": "path"}


@pytest.mark.parametrize(
    ("path", "text", "imports"),
    [
        ("a/b.py", "import os, a.c as d\n  from ..x import y", ["os", "a/c", "/x", "/x/y"]),
        (
            "a/b.py",
            "from . import c\nfrom .d import (e,\n f as g)\n",
            ["/a", "/a/c", "/a/d", "/a/d/e", "/a/d/f"],
        ),
        ("b.py", "from ....x import y\nimport\nfrom x\n", ["/x", "/x/y"]),
        ("a.c", '#include "x/y.h"\n# include <z.h>\n//#include "no.h"', ["x/y.h", "z.h"]),
        (
            "s/a.ts",
            "import {b} from './b'\nexport * from \"../c.js\"\nconst d = require('d')\nimport 'e'",
            ["/s/b", "/c", "d", "e"],
        ),
        ("A.java", "package a;\nimport static b.C.d;\nimport e.F;\n", ["b/C/d", "e/F"]),
        ("a.go", 'import "fmt"\nimport (\n\tx "m/p/q"\n)', ["fmt", "m/p/q"]),
        ("a.txt", "import b", []),
        ("a.py", "from " + "." * 5_000 + "x import y", ["/x", "/x/y"]),
        ("a.js", "from 'x" + "y" * 5_000 + "'", []),
    ],
)
def test_imports_of_languages(path: str, text: str, imports: list[str]) -> None:
    assert find_imports(path, text) == imports


REPOSITORIES = {
    "python": {
        "src/app/main.py": "from app.models import user\nimport app.config",
        "src/app/config.py": "import os",
        "src/app/models/__init__.py": "",
        "src/app/models/user.py": "from ..config import PORT\nfrom . import base",
        "src/app/models/base.py": "",
    },
    "nearest": {
        "a/util.py": "import b.deep.x",
        "b/deep/x.py": "import util",
        "b/util.py": "",
    },
    "c": {"main.c": '#include "lib/z.h"', "lib/z.h": '#include "y.h"', "lib/y.h": ""},
    "javascript": {"a.js": "import './z/index.js'", "z/index.js": "import '../y'", "y.ts": ""},
    "java": {"src/a/A.java": "import b.B;", "src/b/B.java": ""},
    "go": {"a.go": 'import "example.org/m/pkg/z"', "pkg/z/z.go": 'import "example.org/m/y/y"',
           "y/y/b.go": "", "y/y/a.go": ""},
}  # fmt: skip
EXPECTED = {
    "python": ["src/app/config.py", "src/app/models/__init__.py", "src/app/models/base.py",
               "src/app/models/user.py", "src/app/main.py"],
    "nearest": ["b/util.py", "b/deep/x.py", "a/util.py"],
    "c": ["lib/y.h", "lib/z.h", "main.c"],
    "javascript": ["y.ts", "z/index.js", "a.js"],
    "java": ["src/b/B.java", "src/a/A.java"],
    "go": ["y/y/a.go", "y/y/b.go", "pkg/z/z.go", "a.go"],
}  # fmt: skip


def order_paths(files: dict[str, str], shuffle: random.Random) -> list[str]:
    paths = shuffle.sample(list(files), len(files))
    return [paths[n] for n in order_files(paths, [find_imports(one, files[one]) for one in paths])]


@pytest.mark.parametrize("language", REPOSITORIES)
def test_imported_files_come_first_in_any_order_of_the_input(language: str) -> None:
    for seed in range(5):
        found = order_paths(REPOSITORIES[language], random.Random(seed))
        assert found == EXPECTED[language]


def order_plainly(needed: dict[str, set[str]]) -> list[str]:
    """Take the file that waits for fewest, again and again."""
    order: list[str] = []
    while rest := sorted(set(needed) - set(order)):
        order.append(min(rest, key=lambda path: (len(needed[path] - set(order)), path)))
    return order


def test_the_order_is_that_of_a_plain_search_with_and_without_cycles() -> None:
    choose = random.Random(0)
    for _ in range(200):
        names = [f"m{number}" for number in range(choose.randrange(1, 12))]
        needed = {
            name: set(choose.choices(names, k=choose.randrange(3))) - {name} for name in names
        }
        files = {f"{name}.py": "".join(f"import {one}\n" for one in needed[name]) for name in names}
        assert order_paths(files, choose) == [f"{name}.py" for name in order_plainly(needed)]


def test_hostile_repositories_cost_no_more_than_a_sort() -> None:
    everyone = "".join(f"from . import m{number}\n" for number in range(400))
    files = {f"m{number}.py": everyone for number in range(400)}
    assert len(order_paths(files, random.Random(0))) == 400
    for text in ("from " + " " * 500_000 + "x", "from " + "." * 500_000, "import (" * 100_000):
        for ending in (".py", ".c", ".js", ".java", ".go"):
            assert len(find_imports(f"a{ending}", text)) <= 1
    deep = {"/".join("a" * 3_000) + f"/{number}.py": "import a.b" for number in range(50)}
    assert len(order_paths(deep, random.Random(0))) == 50


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def prepare(folder: Path, inputs: list[str], **data: Any) -> list[str]:
    """The ids of the training documents in the order of the token files."""
    settings: dict[str, Any] = {
        "rules": [], "language": {"languages": [], "min_score": 0}, "document_order": ORDER,
        "split": {"heldout_fraction": 0.0001}, "tokens": {"shard_tokens": 1_500},
    }  # fmt: skip
    prepare_dataset(build_tiny_config(folder, inputs, **(settings | data)))
    files = sorted((folder / "tokens").glob("train-*.arrow"))
    assert len(files) > 1
    return [name for file in files for name in pa.ipc.open_file(file).read_all()["id"].to_pylist()]


def build_rows() -> list[dict[str, Any]]:
    choose = random.Random(4)
    rows = [
        {"repo": f"o/{language}{copy}", "path": path, "id": f"{language}{copy} {path}",
         "text": f"{text}\n# {' '.join(write_sentences(choose, 5))}"}
        for copy in range(4) for language, files in REPOSITORIES.items()
        for path, text in files.items()
    ]  # fmt: skip
    alone = [{"id": f"alone {n}", "text": " ".join(write_sentences(choose, 6))} for n in range(9)]
    return rows + alone


def check_order(ids: list[str]) -> None:
    """Every repository is one run of documents, in order."""
    for copy in range(4):
        for language, expected in EXPECTED.items():
            names = [f"{language}{copy} {path}" for path in expected]
            start = ids.index(names[0])
            assert ids[start : start + len(names)] == names


def test_files_of_a_repository_are_next_to_each_other_whatever_the_inputs(tmp_path: Path) -> None:
    rows = random.Random(1).sample(build_rows(), len(build_rows()))
    inputs = [write_rows(tmp_path / f"{n}.jsonl", rows[n::3]) for n in range(3)]
    ids = prepare(tmp_path / "one", inputs)
    check_order(ids)
    assert len(ids) == len(rows)
    executor = {"kind": "local", "workers": 2}
    assert prepare(tmp_path / "two", inputs[::-1], executor=executor) == ids
    assert hash_files(tmp_path / "one") == hash_files(tmp_path / "two")
    doubled = [{"kind": "values", "column": "repo", "weights": {"o/c1": 2}}]
    both = prepare(tmp_path / "doubled", inputs, sampling=doubled)
    names = [f"c1 {path}" for path in EXPECTED["c"]]
    starts = [place for place, name in enumerate(both) if name == names[0]]
    assert [both[start : start + 3] for start in starts] == [names, names]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    inputs = [write_rows(tmp_path / "a.jsonl", build_rows())]
    with pytest.raises(DataError, match=r"repository_field is 'repos', which is no column of"):
        prepare(tmp_path / "one", inputs, document_order=ORDER | {"repository_field": "repos"})
