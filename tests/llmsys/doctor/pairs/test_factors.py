"""The factors name every choice of the config that can change a step."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from llmsys.config.run import RunConfig
from llmsys.config.section import list_section_types
from llmsys.doctor.pairs.cases import (
    Limits,
    RefusedError,
    build_default_assignment,
    build_parts,
    build_resumed_assignment,
    count_ranks,
)
from llmsys.doctor.pairs.factor import LEFT_OUT, list_choices
from llmsys.doctor.pairs.factors import FACTORS, UNNAMED_CHOICES
from tests.helpers.config_variants import list_variants

LIMITS = Limits(processes=4)
BY_PATH = {factor.path: factor for factor in FACTORS if factor.path}
# Sections of a step; the others prepare data, launch processes or look at a run.
STEP_SECTIONS = ("batch", "layout", "train", "loss", "factors")


def list_kinds() -> list[tuple[str, str]]:
    """Return path and kind of every union below the sections of a step."""
    variants = [
        (one.path, one.kind)
        for one in list_variants()
        if one.is_trained or one.path.split(".")[0] in STEP_SECTIONS
    ]
    return [one for one in variants if not one[0].startswith("data")]


@pytest.mark.parametrize(("path", "kind"), list_kinds())
def test_every_kind_of_a_union_is_a_value_of_a_factor(path: str, kind: str) -> None:
    if path in UNNAMED_CHOICES:
        return
    defaults = build_default_assignment()
    kinds = {
        settings.get(f"{path}.kind") or (settings.get(path) or {}).get("kind")
        for factor in FACTORS
        for settings in (value.build_settings(defaults) for value in factor.values)
    }
    assert kind in kinds or any((factor.name, kind) in LEFT_OUT for factor in FACTORS)


def list_train_literals() -> list[tuple[str, Any]]:
    found = []
    for section in ("train", "batch"):
        [owner] = list_section_types(RunConfig.model_fields[section].annotation)
        assert issubclass(owner, BaseModel)
        for name, field in owner.model_fields.items():
            if get_origin(field.annotation) is Literal:
                found += [(f"{section}.{name}", value) for value in get_args(field.annotation)]
    return found


@pytest.mark.parametrize(
    ("path", "value"), [one for one in list_train_literals() if one[0] != "train.on_bad_step"]
)
def test_every_value_of_a_literal_of_train_and_batch_is_a_value_of_a_factor(
    path: str, value: str
) -> None:
    factor = BY_PATH[path]
    assert value in [one.label for one in factor.values] or (factor.name, value) in LEFT_OUT


def test_a_kind_that_is_added_to_a_union_becomes_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmsys.config.norm import RmsNormConfig
    from llmsys.config.section import SectionType
    from llmsys.doctor.pairs import factor

    class NewNormConfig(RmsNormConfig):
        kind: Literal["new"] = "new"  # type: ignore[assignment]

    real = factor.list_section_types  # type: ignore[attr-defined]

    def list_more(annotation: object) -> list[SectionType]:
        sections = real(annotation)
        return [*sections, NewNormConfig] if RmsNormConfig in sections else sections

    monkeypatch.setattr(factor, "list_section_types", list_more)
    assert "new" in list_choices("model.norm")


def test_the_case_with_every_default_is_accepted(tmp_path: Path) -> None:
    [part] = build_parts(build_default_assignment(), 1, tmp_path / "case", LIMITS)
    assert part.ranks == 1
    assert part.config.num_steps == 9


@pytest.mark.parametrize(("factor", "label"), [
    (factor.name, value.label) for factor in FACTORS for value in factor.values if "fp8" not in
    value.label
])  # fmt: skip
def test_every_value_is_in_an_accepted_case_with_what_it_needs(
    factor: str, label: str, tmp_path: Path
) -> None:
    chosen = build_default_assignment()
    value = next(one for one in FACTORS if one.name == factor)
    chosen |= value.get_value(label).needs
    for gate, labels in value.acts_with.items():
        if chosen[gate] not in labels:
            chosen[gate] = sorted(labels)[0]
            chosen |= next(one for one in FACTORS if one.name == gate).get_value(chosen[gate]).needs
    chosen[factor] = label
    build_parts(chosen, 1, tmp_path / "case", LIMITS)


def test_a_refused_case_has_the_message_of_the_config(tmp_path: Path) -> None:
    chosen = build_default_assignment() | {"engine": "zero-1", "pipeline": "2"}
    with pytest.raises(
        RefusedError,
        match=r"engine\.kind: deepspeed runs no stages. Use torch with data_parallel=fsdp",
    ):
        build_parts(chosen, 1, tmp_path / "case", LIMITS)


def test_a_case_that_takes_more_processes_is_refused(tmp_path: Path) -> None:
    chosen = build_default_assignment() | {"pipeline": "2", "shard": "2"}
    with pytest.raises(RefusedError, match="takes 4 processes, more than --processes 2"):
        build_parts(chosen, 1, tmp_path / "case", Limits(processes=2))


def test_a_killed_run_resumes_with_other_axes_and_the_same_model(tmp_path: Path) -> None:
    chosen = build_default_assignment() | {"engine": "zero-1", "shard": "2", "kill": "4 pipeline"}
    before, after = build_parts(chosen, 1, tmp_path / "case", LIMITS)
    assert (before.ranks, before.config.engine.kind) == (2, "deepspeed")
    assert (after.ranks, after.config.engine.kind, after.config.layout.pipeline) == (4, "torch", 4)
    assert before.config.trajectory_settings == after.config.trajectory_settings


def test_the_processes_of_a_case_are_the_product_of_its_axes() -> None:
    chosen = build_default_assignment() | {"replicate": "2", "context": "ring"}
    assert count_ranks(chosen) == 4
    assert count_ranks(build_resumed_assignment(chosen | {"kill": "2 tensor"})) == 2
