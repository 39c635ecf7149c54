"""`llmsys show --kernels` prints the attention kernel of each layer on a device."""

import json

import pytest

from llmsys.launch.main import main


def test_kernels_are_printed_with_reason_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "model/gemma2-2b", "--kernels", "device=a100-80gb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sm_80, bf16, sequences of 512 tokens, training"
    assert lines[1].endswith("20, 22, 24, sliding_attention: flex, not varlen")
    assert lines[2:4] == [
        "    flash attention has no soft cap",
        "    cost: blocks of 128 × 128 that a border cuts are computed whole",
    ]


def test_without_a_device_the_usual_ones_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "train/llama-8b-64xh100", "--kernels", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert {device: [one["kernel"] for one in groups] for device, groups in kernels.items()} == {
        "cpu": ["sdpa"],
        "sm_80": ["varlen"],
        "sm_90": ["varlen"],
        "sm_100": ["varlen"],
    }
    [group] = kernels["sm_90"]
    assert (group["layers"], group["has_table"], group["traits"]["length"]) == (
        list(range(32)),
        False,
        8192,
    )


def test_auto_is_the_dtype_that_the_device_has(capsys: pytest.CaptureFixture[str]) -> None:
    for device, dtype in (("v100", "fp32"), ("sm_80", "bf16"), ("cpu", "bf16")):
        assert main(["show", "train/demo", "--kernels", f"device={device}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f", {dtype}, sequences of 512 tokens" in lines[0]
        assert ("train.precision=fp32" in lines[1]) == (device == "cpu")


def test_layers_are_printed_as_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "train/llama-8b-64xh100", "--kernels", "device=sm_90"]) == 0
    assert "decoder layers 0-31, full_attention: varlen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "tpu-v4",
            "The profile of TPU v4 chip 32GB has no compute_capability, and attention kernels are "
            "known for",
        ),
        ("h1000", "'h1000' has no device profile"),
    ],
)
def test_a_device_without_kernels_is_named(
    device: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "train/demo", "--kernels", f"device={device}"]) == 2
    assert message in capsys.readouterr().err
