"""Every optimizer under every engine that has it: the same steps, and the same bits after a
checkpoint.
"""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from llmsys.config.optimizer import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    PythonOptimizerConfig,
    ScheduleFreeConfig,
    SoapConfig,
)
from llmsys.config.run import RunConfig
from llmsys.train import checkpoint_load
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.optimizer_runs import (
    COPIED,
    DECAY,
    NUDGED,
    RATE,
    STEPS,
    Loss,
    build_engine,
    run_engines,
    take_steps,
)
from tests.helpers.ranks import run_ranks

SHARDED = ("zero1", "zero2", "zero3", "zero3 offload")
PLAIN = ("torch", "zero0", *COPIED)
ALL = (*PLAIN, "bitwise", *SHARDED)
COMMON: dict[str, Any] = {"learning_rate": RATE, "weight_decay": DECAY}
TABLE: dict[str, tuple[OptimizerConfig, tuple[str, ...]]] = {
    "adamw": (AdamWConfig(**COMMON), ALL),
    "adamw bf16": (AdamWConfig(**COMMON, moments="bf16"), ("torch", *COPIED)),
    "adamw int8": (AdamWConfig(**COMMON, moments="int8"), ("torch", *COPIED)),
    "adam": (AdamConfig(**COMMON), PLAIN),
    "lion": (LionConfig(**COMMON), ALL),
    "ademamix": (AdEMAMixConfig(**COMMON, slow_warmup_steps=3, slow_beta=0.99), ALL),
    "schedule_free": (ScheduleFreeConfig(**COMMON), ("torch", "bitwise", *COPIED)),
    "muon": (MuonConfig(**COMMON), (*PLAIN, *SHARDED)),
    "muon polar": (
        MuonConfig(**COMMON, orthogonalization="polar_express", cautious_weight_decay=True),
        (*PLAIN, *SHARDED),
    ),
    "muon neurons": (MuonConfig(**COMMON, neuron_beta=0.9), PLAIN),
    "adamw cautious": (AdamWConfig(**COMMON, cautious_weight_decay=True), ALL),
    "lion cautious": (LionConfig(**COMMON, cautious_weight_decay=True), ALL),
    "adafactor cautious": (AdafactorConfig(**COMMON, cautious_weight_decay=True), PLAIN),
    "adafactor": (AdafactorConfig(**COMMON), PLAIN),
    "soap": (SoapConfig(**COMMON, precondition_every_steps=2), PLAIN),
}
"""Engines of each; a class of the user's own is in tests/llmsys/optim/test_python_optimizer.py.
Moments of 1 or 2 bytes
are rounded by chance: their steps are compared in tests/llmsys/optim/test_compressed_adamw.py."""
# Relative distance of a tensor. Eigenvectors turn by rounding over the gap of their eigenvalues,
# which may be small. Without a rule for null spaces weights are 0.1 to 0.3 apart, and moments 0.5
# to 1.2.
SOAP_BAND = 5e-2
# With the instructions of some processors gaps are smaller. Runs whose rate is off by less than a
# step's band go apart by as much, and say how far engines may, within a factor.
SOAP_MARGIN = 2.0
COMPARED = {
    label: (optimizer, (*kinds, *NUDGED) if label == "soap" else kinds)
    for label, (optimizer, kinds) in TABLE.items()
    if label not in ("adamw", "adamw bf16", "adamw int8")
}
RESUMED = ("torch", "bitwise", "zero2", "zero3")
"""Engines that a resume is tried under; the others hold state as one of these does."""


def run_compared(rank: int) -> list[list[Any]]:
    return [run_engines(rank, kinds, optimizer) for optimizer, kinds in COMPARED.values()]


@pytest.mark.distributed
def test_an_optimizer_takes_the_same_steps_under_every_engine_that_has_it() -> None:
    for (label, (_, kinds)), runs in zip(
        COMPARED.items(), run_ranks(run_compared, 2)[0], strict=True
    ):
        by_kind = dict(zip(kinds, runs, strict=True))
        exact, _ = by_kind["torch"]
        turned = {
            name: SOAP_MARGIN
            * max(
                (float(np.linalg.norm(by_kind[kind][0][name] - value)) for kind in NUDGED),
                default=0.0,
            )
            for name, value in exact.items()
            if label == "soap"
        }
        for kind, (state, steps) in by_kind.items():
            expected, _ = by_kind["ddp" if kind in COPIED else "torch"]
            assert steps == STEPS, (label, kind)
            assert state.keys() == expected.keys(), (label, kind)
            for name, value in expected.items():
                if label == "soap":
                    apart = float(np.linalg.norm(state[name] - value))
                    band = max(SOAP_BAND * float(np.linalg.norm(value)), turned[name]) + 1e-7
                    assert kind in NUDGED or apart <= band, f"{kind}: {name}"
                    continue
                # The sign of an update near zero, hence 2 · RATE, may follow from the order of a
                # sum.
                is_far = np.abs(state[name] - value) > 1e-4 * np.abs(value).max() + 1e-7
                assert is_far.mean() <= 0.01, f"{label}, {kind}: {name}"


def resume_each(rank: int, folder: Path) -> dict[str, list[str]]:
    """Return the tensors that differ between a run and one that a checkpoint interrupted, by
    optimizer and engine.
    """
    found = {}
    for label, (optimizer, kinds) in TABLE.items():
        for kind in set(kinds) & set(RESUMED):
            loss = Loss(skips=False)
            engine = build_engine(kind, loss, optimizer)
            take_steps(engine, loss, range(2), warmup_steps=STEPS)
            save_checkpoint(engine, folder / label / kind, {}, keep_last=1)
            resumed = build_engine(kind, loss, optimizer)
            newest = checkpoint_load.find_newest_checkpoint(folder / label / kind)
            assert newest is not None
            checkpoint_load.load_checkpoint(resumed, newest)
            for one in (engine, resumed):
                torch.manual_seed(5)  # moments of two bytes or one are rounded by chance
                take_steps(one, loss, range(2, STEPS), warmup_steps=STEPS)
            state, again = engine.get_state().tensors, resumed.get_state().tensors
            assert state.keys() == again.keys()
            found[f"{label}, {kind}"] = [
                name for name in state if not torch.equal(state[name], again[name])
            ]
    return found


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    found = run_ranks(resume_each, 1, tmp_path)[0]
    assert len(found) == sum(len(set(kinds) & set(RESUMED)) for _, kinds in TABLE.values())
    assert {label: names for label, names in found.items() if names} == {}


def build_settings(kind: str, label: str) -> dict[str, Any]:
    """Return the sections of a run of an optimizer under an engine."""
    engines = {
        "torch": {"kind": "torch"}, "bitwise": {"kind": "torch"},
        "accelerate": {"kind": "accelerate"},
        "ddp": {"kind": "torch", "data_parallel": "ddp"},
    }  # fmt: skip
    stage = {"kind": "deepspeed", "zero_stage": int(kind[4]) if kind.startswith("zero") else 0}
    settings = {
        "engine": engines.get(kind, stage),
        "optimizer": TABLE[label][0].model_dump(exclude_unset=True),
    }
    settings["optimizer"] |= {"kind": TABLE[label][0].kind}
    if kind == "bitwise":
        settings["train"] = {
            "reproducibility": "bitwise",
            "threads_per_process": 1,
            "compile": "none",
        }
        settings["batch"] = {"micro_sequences": 1}
    if kind == "zero3 offload":
        settings["engine"]["cpu_offload"] = "optimizer"
    return settings


@pytest.mark.parametrize("label", TABLE)
def test_an_engine_without_an_optimizer_refuses_it_by_name(label: str) -> None:
    optimizer, kinds = TABLE[label]
    for kind in ALL:
        settings = build_settings(kind, label)
        if kind in kinds:
            assert RunConfig.model_validate(settings).optimizer == optimizer
            continue
        with pytest.raises(
            ValidationError,
            match=rf"optimizer\.(kind|moments): {optimizer.kind}|optimizer\.(moments|neuron_beta)",
        ):
            RunConfig.model_validate(settings)


def test_every_optimizer_is_in_the_table() -> None:
    union = get_args(get_args(OptimizerConfig)[0])
    assert {type(optimizer) for optimizer, _ in TABLE.values()} | {PythonOptimizerConfig} == set(
        union
    )
