"""Reference page of the Python API: signature and docstring of each public function, without
importing torch.
"""

import ast
import inspect
from pathlib import Path

from tools.docs.markdown import format_anchor

ROOT = Path(__file__).resolve().parents[2]

API = (
    ("llmsys.config.loading.load", "load_run_config", "load_model_config"),
    ("llmsys.estimate.run_estimate", "estimate_run", "list_tensor_counts"),
    ("llmsys.data_pipeline.pipelines.prepare_dataset", "prepare_dataset", "train_tokenizer"),
    ("llmsys.dataset.manifest", "load_manifest", "Manifest"),
    ("llmsys.dataset.token_shards", "open_tokens", "read_batches", "verify_checksums"),
    ("llmsys.vocabulary.tokenizer", "load_tokenizer", "Tokenizer"),
    ("llmsys.train.trained_model", "load_trained_model"),
    ("llmsys.generate.text_generation", "generate_texts"),
    ("llmsys.generate.prompt_completion", "complete_prompts"),
    ("llmsys.convert.from_hugging_face", "convert_from_hugging_face"),
    ("llmsys.convert.to_hugging_face", "convert_to_hugging_face"),
    ("llmsys.events", "iter_events", "read_latest_events"),
    ("llmsys.report.html_page", "write_report"),
    ("llmsys.errors", "LlmsysError", "ConfigError", "DataError"),
)

Definition = ast.FunctionDef | ast.ClassDef


def find_definition(module: str, name: str) -> Definition:
    """Return the definition of a name, in its module or in the one of ours that it is imported
    from.

    Raises:
        KeyError: the module does not have it.
    """
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any(one.name == name for one in node.names)
        ):
            return find_definition(node.module, name)
    raise KeyError(
        f"{module} has no function or class {name}; correct API in tools/docs/api_reference.py"
    )


def format_signature(node: Definition) -> str:
    """Return the head of a function with its types, over several lines where it is long; of a
    class its bases.
    """
    if isinstance(node, ast.ClassDef):
        return (
            f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
            if node.bases
            else f"class {node.name}"
        )
    line = f"{node.name}({ast.unparse(node.args)})" + (
        f" -> {ast.unparse(node.returns)}" if node.returns else ""
    )
    return line if len(line) <= 100 else line.replace("(", "(\n    ", 1)


def format_page() -> str:
    """Return the page."""
    parts = [
        "# Python reference\n\nThe functions of the [Python API](../python.md), from their "
        "docstrings."
    ]
    for module, *names in API:
        parts.append(f"## {module} {{#{format_anchor(module)}}}")
        for name in names:
            node = find_definition(module, name)
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            parts.append(
                f"### {name}\n\n```python\n{format_signature(node)}\n```\n\n```text\n{text}\n```"
            )
    return "\n\n".join(parts) + "\n"
