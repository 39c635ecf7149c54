"""Laws of the code version: it survives renames and prose, and nobody changes a stage without
deciding about it.
"""

import json
from dataclasses import replace
from importlib import metadata

import pytest

from llmsys.data_pipeline.pipelines import stage_code
from llmsys.data_pipeline.pipelines.stage_code import DOCUMENT_STAGES, compute_code_version
from tests.helpers.stage_digest import ACCEPTED, STAGES, compute_digest, compute_stage

SOURCE = '''
"""Count."""
from itertools import chain

import numpy as np

LIMIT = 3

def count(texts: list[str], least: int) -> int:
    """Return a number."""
    found = np.sum([len(text) for text in texts])  # characters
    return found - least if found > LIMIT else 0
'''


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_changed_in_substance_has_a_decision_about_its_version(stage: str) -> None:
    accepted = json.loads(ACCEPTED.read_text()).get(stage)
    assert compute_stage(STAGES[stage]) == accepted, (
        f"the code behind stage {stage} is not the accepted one. If the same inputs can now give "
        "other bytes, raise its version in data_pipeline/pipelines/stage_code.py. Then run "
        "`python -m tests.helpers.stage_digest`."
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("count(", "count_characters("),
        ("text", "document"),
        ("LIMIT", "MIN_CHARACTERS"),
        ("# characters", "# code points"),
        ("Return a number.", "Return the characters of texts."),
        (": list[str]", ": Sequence[str]"),
        ("from itertools import chain\n", ""),
    ],
)
def test_the_digest_survives_renames_prose_types_and_imports(before: str, after: str) -> None:
    changed = SOURCE.replace(before, after)
    assert changed != SOURCE
    assert compute_digest([changed]) == compute_digest([SOURCE])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("np.sum", "np.max"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("found - least", "least - found"),
        (" > ", " >= "),
    ],
)
def test_the_digest_follows_the_substance(before: str, after: str) -> None:
    assert compute_digest([SOURCE.replace(before, after)]) != compute_digest([SOURCE])


def test_the_digest_survives_a_moved_file() -> None:
    other = "WIDTH = 5\n"
    assert compute_digest([SOURCE, other]) == compute_digest([other, SOURCE])


def test_the_key_follows_the_version_and_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    code = DOCUMENT_STAGES["collect"]
    before = compute_code_version(code)
    assert compute_code_version(replace(code, sources=())) == before
    assert compute_code_version(replace(code, version=code.version + 1)) != before
    monkeypatch.setattr(stage_code, "_get_package_version", lambda package: "0.0")
    assert compute_code_version(code) != before


def test_the_version_of_a_package_is_the_one_that_its_whole_metadata_gives() -> None:
    packages = {package for code in DOCUMENT_STAGES.values() for package in code.packages}
    found = {package: stage_code._get_package_version(package) for package in packages}
    assert found == {package: metadata.version(package) for package in packages}
