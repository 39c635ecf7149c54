"""Every shipped config is read once: the schema that editors use accepts it, and it loads."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmsys.config.loading.json_schema import build_json_schema
from llmsys.config.loading.load import read_config
from llmsys.config.loading.yaml_files import parse_yaml
from tests.helpers.paths import CONFIGS

# Profiles of languages are no whole configs.
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if "languages" not in path.parts)


@pytest.fixture(scope="module")
def run_schema() -> dict[str, Any]:
    schema = build_json_schema()
    # once: it takes longer than all configs together
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONFIGS).as_posix())
def test_the_schema_accepts_a_config_and_it_loads(path: Path, run_schema: dict[str, Any]) -> None:
    is_model = path.parent.name == "model"
    only_model = run_schema["$defs"]["ModelConfig"] if is_model else {}
    values, _ = parse_yaml(path.read_text(), path.name)
    jsonschema.Draft202012Validator({**run_schema, **only_model}).validate(values)
    name = path.relative_to(CONFIGS).with_suffix("").as_posix()
    assert read_config(name).is_model_only == is_model
