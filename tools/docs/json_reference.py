"""Reference page and JSON Schema files of what commands print with --json, from their types."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from llmsys.estimate.counted.json_output import CountedOutput
from llmsys.estimate.json_output import EstimateOutput
from llmsys.estimate.plan.json_output import LayoutCheckOutput, PlanOutput
from llmsys.estimate.scaling.json_output import FitOutput, ScaleOutput
from llmsys.estimate.serving_output import ServingOutput, TimedServingOutput
from tools.docs.config_reference import SectionReference

OUTPUTS: dict[str, type[BaseModel]] = {
    "estimate": EstimateOutput,
    "estimate-counted": CountedOutput,
    "estimate-serve": ServingOutput,
    "estimate-serve-device": TimedServingOutput,
    "plan": PlanOutput,
    "plan-check": LayoutCheckOutput,
    "scale": ScaleOutput,
    "scale-fit": FitOutput,
}
HEAD = """# JSON output

What `--json` prints, one object each. Keys stay; new ones may come. Bytes, FLOPs and seconds are
plain numbers.
"""


def build_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's output.

    Args:
        name: key of `OUTPUTS`.

    Returns:
        A schema that rejects keys without a description.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | OUTPUTS[
        name
    ].model_json_schema()


def iter_schemas() -> Iterator[tuple[str, str]]:
    """Yield the path below docs/ and the text of each schema."""
    for name in OUTPUTS:
        yield f"reference/{name}.schema.json", json.dumps(build_schema(name), indent=1) + "\n"


def format_page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name, model in OUTPUTS.items():
        tables = (
            SectionReference({name: [(model, ())]}).format_sections(name).replace("\n## ", "\n### ")
        )
        parts.append(
            f"## {name}\n\nIts JSON Schema is `{name}.schema.json` in the folder of this "
            f"page.\n\n#{tables}"
        )
    return "\n\n".join(parts) + "\n"
