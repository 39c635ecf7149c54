"""Digests of the source behind each stage, which do not change with comments, docstrings, types,
imports or own names.

    python -m tests.helpers.stage_digest

accepts the present source: it writes tests/data_pipeline/pipelines/stage_digests.json.

A name that the sources of a stage bind themselves (a function, class, parameter, variable or field)
counts by the order in which it first occurs, so that renaming it changes nothing and exchanging two
of them does. Other names, such as those of numpy, count as they are.
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from llmsys.data_pipeline.pipelines.stage_code import DOCUMENT_STAGES, PAIR_STAGES, StageCode

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = ROOT / "tests" / "data_pipeline" / "pipelines" / "stage_digests.json"
STAGES: dict[str, StageCode] = DOCUMENT_STAGES | {
    f"pairs/{name}": code for name, code in PAIR_STAGES.items()
}


def list_sources(code: StageCode, root: Path = ROOT) -> list[Path]:
    """Return the Python files of a stage; a source that does not exist is an error."""
    paths = [root / source for source in code.sources]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise FileNotFoundError(f"stage_code.py names {', '.join(missing)}. Correct the path.")
    return sorted(
        {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    )


def compute_digest(sources: Iterable[str]) -> str:
    """Return the digest of the sources, in whatever files and order they are."""
    trees = [_Substance().visit(ast.parse(source)) for source in sources]
    own = {name for tree in trees for node in ast.walk(tree) for name in _list_bound_names(node)}
    texts = sorted(_dump(tree, own) for tree in trees)
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


@cache  # comparisons share one entry
def compute_stage(code: StageCode) -> dict[str, int | str]:
    """Return the entry of a stage in the accepted file."""
    return {
        "version": code.version,
        "digest": compute_digest(path.read_text() for path in list_sources(code)),
    }


class _Substance(ast.NodeTransformer):
    """Removes what has no influence on outputs."""

    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _list_bound_names(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case _:
            return []


def _dump(tree: ast.AST, own: set[str]) -> str:
    numbers: dict[str, str] = {}
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name in own:
                setattr(node, field, numbers.setdefault(name, f"name {len(numbers)}"))
    return ast.dump(tree)


if __name__ == "__main__":
    ACCEPTED.write_text(
        json.dumps({name: compute_stage(code) for name, code in STAGES.items()}, indent=1) + "\n"
    )
