"""Activations change by as much at every width under µP, and by more in wider models under the
standard one.
"""

import json
from pathlib import Path

import pytest

from llmsys.doctor.coordinate_check import widen_model
from llmsys.errors import ConfigError
from llmsys.launch.main import main
from tests.helpers.tiny_training import build_tiny_config

EXPERTS = (
    "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, "
    "norm_topk_prob: true}"
)


@pytest.mark.parametrize("kind", ["mup", "unit_scaled"])
def test_mup_is_flat_and_the_standard_parametrization_grows(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With experts of their own width, whose fan-in is not hidden_size."""
    unit = (
        ["model.parametrization={kind: unit_scaled}", "optimizer.learning_rate=0.5"]
        if kind != "mup"
        else []
    )
    words = [
        "doctor",
        "coordinates",
        "train/mup-tiny",
        EXPERTS,
        *unit,
        "--widths",
        "32,128",
        "--steps",
        "3",
    ]
    assert main([*words, "--html", str(tmp_path / "page.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    exponents = {(row["parametrization"], row["part"]): row["exponent"] for row in found["rows"]}
    for part in ("attention", "feed_forward"):
        assert -0.8 < exponents[kind, part] < 0.25, exponents
        assert exponents["standard", part] > 0.6, exponents
    assert exponents[kind, "logits"] < 0.25
    page = (tmp_path / "page.html").read_text()
    assert "Change of activations, standard" in page
    assert "hidden_size" in page


def test_a_width_that_does_not_fit_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"width 40: model\.num_key_value_heads=2 cannot grow by 40/32\. Use a multiple of 16",
    ):
        widen_model(build_tiny_config(), 40)
