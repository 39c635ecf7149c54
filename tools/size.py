"""Print the size of the code in tokens, by package: `python tools/size.py [--rooms] [PATH ...]`.

Lines reward dense code, so size is counted in tokens of Python's `tokenize`, without comments,
docstrings, newlines and indentation: air, reasons and docstrings cost nothing. `make check` prints
the table. With paths, it is the table of these files and folders.

Invariants:
- A file is counted once: links to folders are not followed.
"""

import argparse
import ast
import io
import os
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("llmsys", "data_pipeline", "launch")
OTHERS = ("tools", "tests")
# What a reader does not read as code: layout, and the marks that tokenize adds.
UNCOUNTED = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


def list_docstring_places(source: str) -> set[tuple[int, int]]:
    """Return line and column where each string that is a whole statement begins."""
    return {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def count_tokens(source: str) -> int:
    """Count the tokens of a Python file without comments, docstrings and layout.

    Args:
        source: Text of the file.

    Returns:
        The number of tokens. A name, a number, a string, an operator and a bracket are one each.
    """
    docstrings = list_docstring_places(source)
    return sum(
        token.type not in UNCOUNTED
        and not (token.type == tokenize.STRING and token.start in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def list_files(path: Path) -> Iterator[Path]:
    """Yield the Python files of a folder, or the file itself; links to folders are not followed.

    Raises FileNotFoundError for a path that is not there.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name files and folders of the checkout.")
    if path.is_file():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def measure_package(path: Path) -> tuple[int, int]:
    """Return the number of files and of tokens of a folder or file."""
    counts = [count_tokens(file.read_text()) for file in list_files(path)]
    return len(counts), sum(counts)


def measure_rooms(package: Path) -> dict[str, tuple[int, int]]:
    """Return files and tokens of each folder directly in a package, and of its own modules."""
    rooms = sorted(path for path in package.iterdir() if path.is_dir() and not path.is_symlink())
    sizes = {f"{package.name}/{room.name}": measure_package(room) for room in rooms}
    modules = [count_tokens(file.read_text()) for file in sorted(package.glob("*.py"))]
    sizes[f"{package.name}/*.py"] = (len(modules), sum(modules))
    return {name: size for name, size in sizes.items() if size[0]}


def sum_sizes(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of files and of tokens."""
    files, tokens = zip(*sizes, strict=True)
    return sum(files), sum(tokens)


def print_row(name: str, size: tuple[int, int]) -> None:
    """Print one line of the table."""
    files, tokens = size
    print(f"{name:<28} {files:>6,} {tokens:>10,}")


def print_table(root: Path, *, with_rooms: bool) -> None:
    """Print the packages of a checkout, with the total of the product after its own.

    Args:
        root: Folder that has the packages.
        with_rooms: Whether each folder of a package has a line of its own as well.
    """
    sizes = {}
    print(f"{'package':<28} {'files':>6} {'tokens':>10}")
    for name in (*PRODUCT, *OTHERS):
        if with_rooms:
            for room, size in measure_rooms(root / name).items():
                print_row(f"  {room}", size)
        sizes[name] = measure_package(root / name)
        print_row(name, sizes[name])
        if name == PRODUCT[-1]:
            print_row("product", sum_sizes(sizes[one] for one in PRODUCT))


def main() -> None:
    """Print the table of the checkout, or of the named paths and their total."""
    parser = argparse.ArgumentParser(description="Print the size of the code in tokens.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders (default: all)")
    parser.add_argument("--rooms", action="store_true", help="print the folders of each package")
    arguments = parser.parse_args()
    if not arguments.paths:
        print_table(ROOT, with_rooms=arguments.rooms)
        return
    try:
        sizes = {str(path): measure_package(path) for path in arguments.paths}
    except FileNotFoundError as missing:
        sys.exit(f"size: {missing}")
    for name, size in sizes.items():
        print_row(name, size)
    print_row("total", sum_sizes(sizes.values()))


if __name__ == "__main__":
    main()
