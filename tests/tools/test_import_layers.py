"""The one direction of import that import-linter cannot see: `torch.distributed` is a part of
torch, not a package.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ALLOWED = (
    "llmsys/calibrate/",
    "llmsys/parallel/",
    "llmsys/engine/",
    "llmsys/train/consistency_check.py",
    "llmsys/train/step_metrics.py",
    "llmsys/train/checkpoint",
    "llmsys/doctor/",
    "llmsys/dryrun/",
    "launch/",
    "llmsys/convert/checkpoint_stream.py",
)


def uses(tree: ast.AST) -> Iterator[int]:
    """The lines that import torch.distributed or reach into it through `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any(
            name == "torch.distributed" or name.startswith("torch.distributed.") for name in names
        ):
            yield node.lineno


def test_process_groups_are_known_in_few_places(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository).as_posix()}:{line}"
        for room in ("llmsys", "data_pipeline", "launch")
        for path in sorted((repository / room).rglob("*.py"))
        for line in uses(ast.parse(path.read_text()))
    ]
    assert [place for place in found if not place.startswith(ALLOWED)] == []


def test_every_spelling_is_seen() -> None:
    spellings = (
        "import torch.distributed as dist",
        "from torch import distributed",
        "torch.distributed.barrier()",
    )
    assert all(
        list(uses(ast.parse(spelling)))
        for spelling in (*spellings, "from torch.distributed.fsdp import x")
    )
    assert not list(uses(ast.parse("from torch import nn; torch.distributions.Normal")))
