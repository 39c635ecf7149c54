"""Devices: every number has a source, and one that nobody described is refused by name."""

import json
from pathlib import Path

import pytest

from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import list_device_names, load_device_profile
from llmsys.launch.main import main

CONFIG = "model/gpt2-small"


@pytest.mark.parametrize("name", list_device_names())
def test_a_profile_names_a_source_for_each_of_its_numbers(name: str) -> None:
    device = load_device_profile(name)
    said = set(device.sources)
    assert {"peak_flops", "memory_bandwidth", "memory_bytes", "node", "network", "watts"} <= said
    assert {"products", "attention", "memory", "links", "launch"} <= said
    assert all(len(text) > 10 for text in device.sources.values())


# Multiprocessors, clock in GHz, and FLOP of each per clock in dense 16-bit products that add into
# fp32, from the whitepaper of the architecture; and FLOP per clock in fp32.
UNITS = {
    "rtx-3090": (82, 1.695, 512, 256),
    "rtx-4090": (128, 2.52, 512, 256),
    "rtx-5090": (170, 2.407, 512, 256),
    "a6000": (84, 1.8, 1024, 256),
    "l4": (58, 2.04, 1024, 256),
    "l40s": (142, 2.52, 1024, 256),
    "a10": (72, 1.695, 1024, 256),
    "t4": (40, 1.59, 1024, 128),
    "h100-pcie": (114, 1.62, 4096, 256),
    "h100-sxm": (132, 1.83, 4096, 256),
    "a100-80gb": (108, 1.41, 2048, 128),
    "v100": (80, 1.53, 1024, 128),
    "mi300x": (304, 2.1, 2048, 256),
}


@pytest.mark.parametrize("name", UNITS)
def test_peaks_are_dense_as_units_and_clock_give_them(name: str) -> None:
    device = load_device_profile(name)
    units, gigahertz, half, single = UNITS[name]
    assert device.get_peak_flops("fp16") == pytest.approx(units * half * gigahertz * 1e9, rel=0.03)
    # the clock of a board is higher where its tensor cores rest
    assert device.get_peak_flops("fp32") == pytest.approx(
        units * single * gigahertz * 1e9, rel=0.09
    )
    if "fp8" in device.peak_flops:
        assert device.peak_flops["fp8"] == pytest.approx(2 * device.peak_flops["fp16"], rel=0.03)


def test_a_card_without_bf16_is_refused_by_the_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["estimate", CONFIG, "--device", "t4", "batch.sequences=16"]
    assert main([*words, "train.precision=bf16"]) == 2
    assert "T4 16GB has no peak for bf16 matmuls. Use fp16 or fp32" in capsys.readouterr().err


def test_an_unknown_device_is_refused_with_the_known_ones_and_the_way_to_measure() -> None:
    with pytest.raises(ConfigError) as error:
        load_device_profile("h100-smx")
    text = str(error.value)
    assert "'h100-smx' has no device profile, and no other profile is used instead." in text
    assert "Did you mean h100-sxm?" in text
    assert all(name in text for name in list_device_names())
    assert "llmsys calibrate --output h100-smx.yaml" in text


def test_a_profile_with_a_wrong_number_is_refused_with_file_line_and_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\npeak_flops: {bf16: 1e12}\nmemory_bytes: -1\nmemory_bandwidth: 1e9\nsources: "
        "{}\n"
    )
    with pytest.raises(ConfigError, match=r"mine.yaml:3: memory_bytes: -1"):
        load_device_profile(str(path))


def test_a_number_type_without_a_peak_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"V100 SXM2 32GB has no peak for bf16 matmuls. Use fp16 or fp32"
    ):
        load_device_profile("v100").get_peak_flops("bf16")


def test_the_command_prices_a_bare_models_step_and_says_why_the_rest_is_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_device = ["estimate", CONFIG, "--device", "a100-80gb", "--gpus", "8"]
    assert main(on_device) == 2
    message = capsys.readouterr().err
    assert (
        message.count("batch.sequences=")
        == message.count(f"llmsys estimate {CONFIG} --device a100-80gb")
        == 2
    )
    assert main([*on_device, "batch.sequences=16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["time"]["ranks"] == 8
    assert result["time"]["run"] is None
    assert set(result["unknown"]) == {"money", "energy"}
    assert main(["estimate", CONFIG, "--gpus", "8"]) == 2
    assert (
        "needs a device. Add --device NAME, such as --device h100-sxm." in capsys.readouterr().err
    )


def test_the_command_prices_a_run_and_prints_every_assumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = tmp_path / "room.yaml"
    room.write_text("device: h200\ndevices: 16\nprice_per_hour: 2\ncurrency: EUR\n")
    assert (
        main(["estimate", "train/demo", "--cluster", str(room), "batch.sequences=16", "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["unknown"] == {}
    assert result["time"]["ranks"] == 16
    hours, amount = result["money"]["accelerator_hours"], result["money"]["amount"]
    assert amount["p50"] == pytest.approx(2 * hours["p50"])
    assert hours["p10"] < hours["p50"] < hours["p90"]
    assert main(["estimate", "train/demo", "--cluster", str(room), "batch.sequences=16"]) == 0
    text = capsys.readouterr().out
    assert all(
        words in text for words in ("on 16 × H200", "EUR", "price_per_hour 2", "pue 1.1", "goodput")
    )


def test_a_cluster_with_an_unknown_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = tmp_path / "room.yaml"
    room.write_text("price_per_hours: 2\n")
    assert main(["estimate", "train/demo", "--cluster", str(room)]) == 2
    assert (
        "room.yaml:1: price_per_hours: unknown key. Did you mean price_per_hour?"
        in capsys.readouterr().err
    )
