"""Every variant of every tagged union passes show, build, train step, estimate, convert and report.

A variant that is added and forgotten somewhere fails here, under the name of the stage and of the
variant: it has no example, trains exactly as another one, or is estimated otherwise than PyTorch
counts and the process measures. tests/test_every_data_variant.py prepares the variants of `data`,
`tokenizer` and `evaluation`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.export.exported_model import choose_export
from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.loading.format_yaml import format_yaml
from llmsys.config.loading.load import build_model_config, load_run_config
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.convert.conversion_plan import build_conversion_plan
from llmsys.convert.family_mappings import get_family_mapping
from llmsys.data.batch import Batch
from llmsys.errors import ConfigError
from llmsys.estimate.flops import count_flops
from llmsys.estimate.run_estimate import estimate_run
from llmsys.estimate.state_memory import compute_state_bytes
from llmsys.estimate.step_time import estimate_step_time
from llmsys.estimate.summary_table import format_estimate
from llmsys.optim.lr_schedule import compute_learning_rate
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.report.html_page import build_run_origin
from llmsys.report.run_record import read_run
from llmsys.report.run_sections import build_run_sections
from llmsys.train.build_engine import build_engine, build_model
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.config_variants import (
    EXAMPLES,
    LENGTH,
    ConfigVariant,
    Settings,
    build_config,
    build_settings,
    list_variants,
)
from tests.helpers.counted_flops import SEQUENCES, SOURCE, TARGET, count_forward_flops
from tests.helpers.device_profile import build_abacus
from tests.helpers.example_run import run_events, write_run
from tests.helpers.hugging_face_families import FAMILIES
from tests.helpers.objective_batches import build_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.saved_bytes import compare_saved_bytes

VARIANTS = list_variants()
TRAINED = [variant for variant in VARIANTS if variant.is_trained]
OF_MODEL = [variant for variant in TRAINED if variant.path.startswith("model.")]
# Hidden states are no prediction: nothing to learn.
NOT_TRAINED = {"model.head.kind=features"}
# Left out of what `show` prints, as datasets of versions without the key have no such key.
NOT_SHOWN = {"data.document_order.kind=hash"}
# No model type of Hugging Face has these: the export is rejected.
NOT_EXPORTED = {
    "model.head.kind=permutation",
    "model.residual.kind=deepnorm",
    "model.residual.kind=reversible",
    "model.attention.kind=longformer",
    "model.attention.kind=linformer",
    "model.attention.kind=lsh",
    "model.attention.kind=segment_memory",
    "model.attention.kind=python",
    "model.feed_forward.kind=python",
    "model.recurrence.kind=fixed",
    "model.recurrence.kind=adaptive",
    "model.rnn.kind=elman",
    "model.rnn.kind=lstm",
    "model.rnn.kind=gru",
    "model.position.kind=transformer_xl",
    "model.position.scaling.kind=ntk",
    "model.feed_forward.kind=clamped_swiglu",
    "model.moe.expert.kind=relu",
    "model.moe.expert.kind=gelu",
    "model.moe.expert.kind=gelu_tanh",
    "model.moe.expert.kind=silu",
    "model.moe.routing.kind=capacity",
    "model.moe.routing.kind=expert_choice",
    "model.moe.balance.kind=none",
}
# In the exported weights; the config.json has none of them.
IN_WEIGHTS = {
    "model.parametrization.kind=mup",
    "model.parametrization.kind=complete_p",
    "model.parametrization.kind=unit_scaled",
}
STEPS = 2

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
trained_variant = pytest.mark.parametrize("variant", TRAINED, ids=str)
model_variant = pytest.mark.parametrize("variant", OF_MODEL, ids=str)


def get_config(variant: ConfigVariant) -> RunConfig:
    if str(variant) not in EXAMPLES:
        pytest.fail(
            f"{variant} has no example. Add its smallest settings to EXAMPLES in {EXAMPLES_FILE}."
        )
    return build_config(variant)


EXAMPLES_FILE = "tests/helpers/config_variants.py"


def test_every_variant_has_an_example_and_every_example_a_variant() -> None:
    known = {str(variant) for variant in VARIANTS}
    assert sorted(known - EXAMPLES.keys()) == [], (
        f"add their smallest settings to EXAMPLES in {EXAMPLES_FILE}"
    )
    assert sorted(EXAMPLES.keys() - known) == [], f"remove them from EXAMPLES in {EXAMPLES_FILE}"


@every_variant
def test_show(variant: ConfigVariant, tmp_path: Path) -> None:
    config = get_config(variant)
    text = format_yaml(config)
    assert (f"kind: {variant.kind}" in text) == (str(variant) not in NOT_SHOWN)
    (tmp_path / "config.yaml").write_text(text)
    if str(variant) not in NOT_TRAINED:
        assert load_run_config(str(tmp_path / "config.yaml")) == config


@model_variant
def test_build(variant: ConfigVariant) -> None:
    config = get_config(variant)
    model = build_model(config)  # compares the number of parameters with the estimate's
    assert model.config == config.model


@dataclass(frozen=True)
class Training:
    """What a training run showed: everything that must differ where a setting differs."""

    engine: str
    learning_rates: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    tensors_sum: float
    moments_bytes: int


def build_step_batch(config: RunConfig, step: int) -> Batch:
    if config.objective.kind != "next_token":
        return build_batch(config.objective.kind, step, 0, range(4))
    tokens_BT = torch.randint(0, 40, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous(), None)


def train(config: RunConfig) -> Training:
    device = torch.device("cpu")
    engine = build_engine(config, build_device_meshes(config.resolve_layout(1), device), device)
    rates = tuple(
        float(compute_learning_rate(config, step)) for step in range(1, config.num_steps + 1)
    )
    results = []
    for step in range(STEPS):
        results.append(engine.train_step([build_step_batch(config, step)], rates[step]))
        update_expert_balance(engine.module)
    tensors = engine.get_state().tensors
    return Training(
        engine=type(engine).__name__,
        learning_rates=rates,
        losses=tuple(result.loss for result in results),
        gradient_norms=tuple(result.gradient_norm for result in results),
        tensors_sum=sum(float(tensor.double().abs().sum()) for tensor in tensors.values()),
        moments_bytes=sum(tensor.nbytes for name, tensor in tensors.items() if "_moment/" in name),
    )


def train_each(rank: int, configs: dict[str, RunConfig]) -> dict[str, Training | str]:
    found: dict[str, Training | str] = {}
    for name, config in configs.items():
        try:
            found[name] = train(config)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def trainings() -> dict[str, Training | str]:
    """Two steps of every variant, all in one process: most of the time is the start of torch and
    DeepSpeed.
    """
    configs = {
        str(variant): build_config(variant) for variant in TRAINED if str(variant) in EXAMPLES
    }
    found: dict[str, Training | str] = run_ranks(train_each, 1, configs)[0]
    return found


@trained_variant
def test_train_step(variant: ConfigVariant, trainings: dict[str, Training | str]) -> None:
    get_config(variant)
    if str(variant) in NOT_TRAINED:
        return
    found = trainings[str(variant)]
    assert isinstance(found, Training), f"{variant} does not train: {found}"
    same = [
        str(other)
        for other in TRAINED
        if other.path == variant.path and other != variant and trainings.get(str(other)) == found
    ]
    assert not same, (
        f"{variant} trains exactly as {', '.join(same)}: the code that trains does not know it"
    )


@model_variant
def test_estimate_of_flops(variant: ConfigVariant) -> None:
    model = get_config(variant).model
    counted = count_flops(model, SOURCE, SEQUENCES, "full", target_length=TARGET).forward
    assert counted == count_forward_flops(model), (
        f"the estimate counts other operations for {variant} than PyTorch"
    )


@model_variant
def test_estimate_of_saved_bytes(variant: ConfigVariant) -> None:
    get_config(variant)
    measured, estimated = compare_saved_bytes(
        build_settings(variant)["model"], torch.float32, "none", documents=False
    )
    assert estimated == pytest.approx(measured, rel=0.08), f"the estimate of {variant} is off"


@trained_variant
def test_estimate_of_a_run(variant: ConfigVariant, trainings: dict[str, Training | str]) -> None:
    config = get_config(variant)
    text = format_estimate(estimate_run(config, device=build_abacus()))
    assert "parameters" in text.lower()
    layout = config.resolve_layout(1)
    assert estimate_step_time(config, layout, build_abacus()).seconds.p50 > 0
    found = trainings[str(variant)]
    if isinstance(found, Training):
        estimated = compute_state_bytes(config, layout).moments
        assert estimated == found.moments_bytes, (
            f"the estimate of {variant} has other moments than its training"
        )


def find_exported_models() -> dict[str, ModelConfig]:
    """Return a model of the tiny Hugging Face families for each `path.kind=kind` that one of
    them has.
    """
    found: dict[str, ModelConfig] = {}
    for model_type, _, values in FAMILIES.values():
        model = build_model_config({"model_type": model_type} | values)
        pending: list[tuple[str, Settings]] = [("model", model.model_dump())]
        while pending:
            path, section = pending.pop()
            found.setdefault(f"{path}.kind={section.get('kind')}", model)
            pending += [
                (f"{path}.{key}", value)
                for key, value in section.items()
                if isinstance(value, dict)
            ]
    return found


EXPORTED = find_exported_models()


@model_variant
def test_convert(variant: ConfigVariant) -> None:
    """A model type of Hugging Face has it and its tensors are mapped, or the export is rejected
    and names it.
    """
    model = EXPORTED.get(str(variant)) or get_config(variant).model
    try:
        choice = choose_export(model)
    except ConfigError as error:
        if str(variant) not in NOT_EXPORTED:
            pytest.fail(
                f"{variant} is in no model type of Hugging Face: {error} Give one, or list it in "
                "NOT_EXPORTED."
            )
        return
    assert str(variant) not in NOT_EXPORTED
    section: Any = build_model_config(choice.values)
    for key in variant.path.split(".")[1:]:
        section = getattr(section, key)
    assert section.kind == ("standard" if str(variant) in IN_WEIGHTS else variant.kind), (
        f"{variant} is lost in config.json, which reads back as {section.kind}"
    )
    assert build_conversion_plan(
        choice.model, get_family_mapping(choice.model_type, choice.model)
    ).their_shapes


@trained_variant
def test_report(variant: ConfigVariant, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", run_events(steps=20, layers=0))
    values = get_config(variant).model_dump(mode="json")
    (folder / "config.yaml").write_text(format_recorded_config(values))
    record = read_run(folder)
    assert build_run_sections(record, None)
    assert f"kind: {variant.kind}" in build_run_origin(record)
