"""Reference page of every file format, from the Arrow schemas, the sections of the manifest and
the docstrings.
"""

import ast
from pathlib import Path

import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA, build_document_schema
from llmsys.data_pipeline.dedup.dedup_index import INDEX_KEY_SCHEMA
from llmsys.data_pipeline.pairs.read import PAIR_SCHEMA
from llmsys.dataset.loss_parts import LOSS_SCHEMA
from llmsys.dataset.manifest import Manifest
from llmsys.dataset.token_file import INDEX_SCHEMA
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.program_profile import ProgramProfile
from llmsys.storage.arrow_file import build_token_schema
from llmsys.storage.stored_formats import EARLIER_RELEASE, FORMATS
from tools.docs.config_reference import SectionReference
from tools.docs.markdown import format_docstring, format_table

ROOT = Path(__file__).resolve().parents[2]

SCHEMAS = (
    (
        "documents/*.arrow",
        "Kept documents of a crawl (zstd).",
        build_document_schema([pa.field("RULE.STATISTIC", pa.float32())]),
    ),
    ("documents/*.arrow of pairs", "Sources and targets, or texts and labels (zstd).", PAIR_SCHEMA),
    ("dropped/*.arrow", "Dropped documents (zstd).", DROPPED_SCHEMA),
    (
        "tokens/*.arrow",
        "Token ids, one row per document (uint32 above 65,536 pieces).",
        build_token_schema("uint16"),
    ),
    ("tokens/*.index", "The token files of a split.", INDEX_SCHEMA),
    (
        "document_losses/*.arrow of a run",
        "Losses by document, one row per run of targets that a rank computed (zstd).",
        LOSS_SCHEMA,
    ),
    ("index/*.arrow", "Keys of kept documents for later datasets.", INDEX_KEY_SCHEMA),
)
# Files whose layout is described where the code reads and writes them; torch is not imported for a
# page.
DESCRIBED = (
    ("tokens/*.pages", "llmsys/dataset/token_file.py"),
    ("config.yaml", "llmsys/config/loading/config_files.py"),
    ("environment.json", "llmsys/train/run_folder.py"),
    ("checkpoints/step-…/state.json", "llmsys/train/checkpoint_record.py"),
    ("checkpoints/step-…/metadata.json", "llmsys/train/checkpoint_metadata.py"),
    ("checkpoints/step-…/__RANK_0.index", "llmsys/train/checkpoint_index.py"),
    ("journal/records.sqlite", "data_pipeline/core/journal.py"),
    ("events.jsonl", "llmsys/events.py"),
)
MODELS = (
    ("manifest.json", "manifest", Manifest),
    ("A device profile", "device", DeviceProfile),
    ("A program profile", "program", ProgramProfile),
    ("The costs of a cluster", "cluster", ClusterCosts),
)


def format_schema(name: str, text: str, schema: pa.Schema) -> str:
    """Return the section of one Arrow file."""
    rows = [(f"`{field.name}`", str(field.type).replace("<", "\\<")) for field in schema]
    return f"## {name}\n\n{text}\n\n{format_table(('column', 'type'), rows)}"


def format_module(name: str, path: str) -> str:
    """Return the section of a file that a module's docstring describes."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    paragraphs = [
        "\n".join(["Invariants:", "", *(line.strip() for line in part.splitlines()[1:])])
        if part.startswith("Invariants:")
        else format_docstring(part)
        for part in docstring.split("\n\n")
    ]
    return f"## {name}\n\n" + "\n\n".join([*paragraphs, f"Read and written by `{path}`."])


def format_versions() -> str:
    """Return the table of formats and their versions."""
    rows = [
        (one.files.replace("*", "\\*"), one.name, str(one.version), one.place, one.readers)
        for one in FORMATS
    ]
    return (
        "## Versions\n\nEvery stored file has the version of its format. A command that finds "
        "another version ends with exit status 2 and one message, which names the version of "
        "llmsys that reads the file; nothing in the folder changes. Files without a version are "
        f"those of llmsys {EARLIER_RELEASE}.\n\n"
        + format_table(("file", "format", "version", "where it is", "who reads it"), rows)
    )


def format_page() -> str:
    """Return the page."""
    parts = [
        "# File formats\n\nFiles of a dataset folder, a run folder, and files that you write. "
        "`llmsys inspect` verifies those of a dataset. All Arrow files are in the IPC format, "
        "which pyarrow, polars, DuckDB (by pyarrow) and datasets read.",
        format_versions(),
    ]
    parts += [format_schema(*entry) for entry in SCHEMAS]
    parts += [format_module(*entry) for entry in DESCRIBED]
    for title, page, model in MODELS:
        tables = SectionReference({page: [(model, ())]}).format_sections(page)
        parts.append(
            f"## {title}\n\n" + tables.replace("\n## ", "\n### ").replace("## ", "### ", 1)
        )
    return "\n\n".join(parts) + "\n"
