"""What a user's config chooses is the default of every case."""

from pathlib import Path
from typing import Any

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.cases import Limits, build_default_assignment, build_parts, build_settings
from llmsys.doctor.pairs.config_factors import OWN, replace_defaults
from llmsys.doctor.pairs.factor import Factor
from llmsys.doctor.pairs.factors import FACTORS


def build_factors(**sections: Any) -> dict[str, Factor]:
    config = RunConfig.model_validate(sections)
    return {factor.name: factor for factor in replace_defaults(FACTORS, config)}


def test_choices_that_factors_have_become_their_defaults() -> None:
    factors = build_factors(
        optimizer={"kind": "lion", "betas": (0.9, 0.99)},
        train={"tokens": 10**9, "activation_checkpoint": "full", "precision": "bf16"},
    )
    assert factors["recomputation"].default == "full"
    assert factors["precision"].default == "bf16"
    assert factors["optimizer"].default == "lion"


def test_a_section_with_further_fields_is_a_value_of_its_own(tmp_path: Path) -> None:
    factors = build_factors(model={
        "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "norm": {"kind": "layernorm", "bias": False},
    })  # fmt: skip
    assert factors["norm"].default == OWN
    ordered = tuple(factors.values())
    assignment = build_default_assignment(ordered)
    assert build_settings(assignment, ordered)["model"]["norm"]["bias"] is False
    [part] = build_parts(assignment, 1, tmp_path / "case", Limits(), ordered)
    # The widths stay those of the check.
    assert part.config.model.hidden_size == 32
    assert part.config.model.norm.kind == "layernorm"


def test_every_value_stays() -> None:
    before = {factor.name: {value.label for value in factor.values} for factor in FACTORS}
    after = build_factors(train={"tokens": 10**9, "precision": "bf16"})
    assert all(
        labels <= {value.label for value in after[name].values} for name, labels in before.items()
    )


ROOT = Path(__file__).resolve().parents[4] / "configs"
TRAINING = sorted([*(ROOT / "train").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")])


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_the_choices_of_every_shipped_run_make_a_case(path: Path, tmp_path: Path) -> None:
    factors = replace_defaults(FACTORS, load_run_config(str(path)))
    assert build_parts(build_default_assignment(factors), 1, tmp_path / "case", Limits(), factors)


def test_what_a_chosen_kind_needs_is_chosen_too() -> None:
    factors = build_factors(
        model={
            "vocab_size": 8192,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "attention": {"kind": "lsh", "chunk_length": 8, "num_hashes": 2},
            "position": {"kind": "learned"},
            "max_position_embeddings": 512,
        }
    )
    assert factors["attention"].default == "lsh"
    assert factors["heads"].default == "multi"
