"""train.precision=auto: which number type a device takes, and that a run keeps the one it began
with.
"""

import logging
import platform
import sys
from pathlib import Path

import pytest
import torch

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.train import precision
from llmsys.train.checkpoint_record import RECORD, write_record
from llmsys.train.precision import (
    NativeSupport,
    find_bf16_support,
    find_recorded_precision,
    resolve_precision,
)

CPU = torch.device("cpu")
NATIVE, SLOW = NativeSupport(True, "it has units"), NativeSupport(False, "it has no units")


@pytest.fixture
def bf16_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An x86 processor with avx512_bf16, and nothing in the environment that lowers it."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for variable in precision.ISA_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def load_config_in(folder: Path, asked: str = "auto", **train: str) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"folder": str(folder)}, "train": {"precision": asked, **train}}
    )


def record_checkpoint(folder: Path, number: str) -> None:
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    write_record(checkpoint, {"steps": 2, "run": {"train": {"precision": number}}, "files": {}})


@pytest.mark.usefixtures("bf16_processor")
@pytest.mark.parametrize("variable", precision.ISA_VARIABLES)
@pytest.mark.parametrize(
    ("value", "native"),
    [
        ("", True),
        ("ALL", True),
        ("avx512_core_bf16", True),
        ("AVX2", False),
        ("AVX512_CORE", False),
    ],
)
def test_onednn_variables_lower_the_processor(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, native: bool
) -> None:
    monkeypatch.setenv(variable, value)
    found = find_bf16_support(CPU)
    assert found.is_native == native
    assert native or found.reason == f"{variable}={value} disables its bfloat16 instructions"


@pytest.mark.usefixtures("bf16_processor")
def test_a_processor_without_the_instructions_is_not_native(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert find_bf16_support(CPU) == (False, "the processor has neither avx512_bf16 nor AMX")


@pytest.mark.usefixtures("bf16_processor")
@pytest.mark.parametrize(
    ("flags", "native"), [("fp asimd bf16 i8mm", True), ("fp asimd asimdhp", False)]
)
def test_an_arm_processor_is_read_from_its_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, native: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {flags}\n")
    assert find_bf16_support(CPU).is_native == native


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_macos_and_other_devices_take_fp32(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert not find_bf16_support(CPU).is_native
    assert not find_bf16_support(torch.device("mps")).is_native


@pytest.mark.parametrize(
    ("capability", "native"), [((9, 0), True), ((8, 0), True), ((7, 5), False)]
)
def test_gpus_are_native_from_capability_8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    assert find_bf16_support(torch.device("cuda", 0)).is_native == native


@pytest.mark.parametrize(("support", "expected"), [(NATIVE, "bf16"), (SLOW, "fp32")])
def test_auto_is_resolved_logged_and_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    support: NativeSupport,
    expected: str,
) -> None:
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: support)
    with caplog.at_level(logging.INFO):
        resolved = resolve_precision(load_config_in(tmp_path))
    assert [one.getMessage() for one in caplog.records] == [
        f"train.precision=auto selects {expected}: {support.reason}"
    ]
    assert (
        resolved.train.precision == resolved.trajectory_settings["train"]["precision"] == expected
    )


def test_one_rank_without_bf16_gives_all_ranks_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: NATIVE)
    monkeypatch.setattr(
        precision, "all_gather_object", lambda own: [own, (False, 1, "it has no units")]
    )
    assert resolve_precision(load_config_in(tmp_path)).train.precision == "fp32"


@pytest.mark.parametrize(("recorded", "support"), [("bf16", SLOW), ("fp32", NATIVE)])
def test_a_run_on_another_machine_keeps_its_type_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recorded: str,
    support: NativeSupport,
) -> None:
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: support)
    record_checkpoint(tmp_path, recorded)
    with caplog.at_level(logging.INFO):
        resolved = resolve_precision(load_config_in(tmp_path))
    assert resolved.train.precision == recorded
    own = "bf16" if support.is_native else "fp32"
    assert caplog.records[0].getMessage() == (
        f"train.precision=auto selects {recorded}: {tmp_path} was trained in it, and a run keeps "
        f"its dtype; a new run would use {own} here"
    )
    assert any("start a new run.folder" in one.getMessage() for one in caplog.records) == (
        recorded == "bf16"
    )


def test_a_damaged_record_is_no_type(tmp_path: Path) -> None:
    record_checkpoint(tmp_path, "bf16")
    assert find_recorded_precision(tmp_path) == "bf16"
    (tmp_path / "checkpoints/step-00000002" / RECORD).write_text("{")
    assert find_recorded_precision(tmp_path) is None


def test_bf16_by_name_without_native_products_warns_with_the_measured_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: SLOW)
    monkeypatch.setattr(precision, "measure_slowdown", lambda _: 61.04)
    assert resolve_precision(load_config_in(tmp_path, "bf16")).train.precision == "bf16"
    assert [one.getMessage() for one in caplog.records] == [
        "train.precision=bf16 is slow on this device (it has no units): a matmul of 192 x 192 "
        "takes 61 times as long as in fp32. Use train.precision=auto or fp32."
    ]
    caplog.clear()
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: NATIVE)
    resolve_precision(load_config_in(tmp_path, "bf16"))
    assert not caplog.records


def test_the_factor_is_measured() -> None:
    assert precision.measure_slowdown(torch.float32) == pytest.approx(1, abs=50)


def test_what_needs_bf16_says_so_when_auto_is_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config_in(tmp_path, matmul_dtype="fp8")
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: SLOW)
    message = (
        r"train.precision=auto is fp32 here \(it has no units\), which is invalid: "
        r"train.matmul_dtype: fp8 "
    )
    with pytest.raises(ConfigError, match=message):
        resolve_precision(config)
    monkeypatch.setattr(precision, "find_bf16_support", lambda _: NATIVE)
    assert resolve_precision(config).train.precision == "bf16"


def test_an_unresolved_type_never_reaches_what_a_run_compares(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.precision=auto needs a device"):
        _ = load_config_in(tmp_path).trajectory_settings
