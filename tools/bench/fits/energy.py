"""Compare measured energies of whole runs with the estimate. Other published energies are hours
times assumed watts.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import mean
from typing import Any

from llmsys.errors import LlmsysError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.percentile_interval import PercentileInterval, build_log_normal_interval
from llmsys.estimate.residual_model import ResidualModel
from llmsys.estimate.run_cost import compute_mean_watts
from tools.bench.fits.published_row import find_model_words, load_words_model
from tools.bench.fits.run_rows import build_full_run
from tools.bench.fits.time_rows import TimeRow

CHIPS = re.compile(r"\b(A100|H100|H200|V100|TPUv3|TPUv4)\b")
TOKENS = {"gpt3-175b": 300e9}  # Brown 2020, table 2.1; the other rows say theirs


POWER_SPREAD = 0.2  # mean power of an accelerator in training lies between 0.7 and 1.0 of its limit


@dataclass(frozen=True)
class EnergyRow:
    """One measured energy and the modelled one, in MWh. `note` names what the number covers."""

    name: str
    measured: float
    modelled: float
    calibrates: bool
    note: str

    def predict_interval(self, fitted: ResidualModel) -> PercentileInterval:
        """Return the predicted interval in MWh."""
        return build_log_normal_interval(self.modelled * fitted.factor, fitted.spread)


def build_energy_rows(rows: list[dict[str, Any]], run: ResidualModel) -> list[EnergyRow]:
    """Return every row whose model and device have a description."""
    found: list[EnergyRow] = []
    for row in rows:
        with suppress(LlmsysError, KeyError):
            found.append(_build_energy_row(row, run, calibrates=len(found) % 2 == 0))
    return found


def fit_energy(rows: list[EnergyRow], run: ResidualModel) -> ResidualModel:
    """Return the factor of the calibration rows. They are too few for a spread, which is that of
    runs and of power.
    """
    kept = [row for row in rows if row.calibrates]
    middle = mean(log(row.measured / row.modelled) for row in kept)
    names = tuple(row.name for row in kept)
    return ResidualModel(
        factor=round(exp(middle), 3), spread=round(hypot(run.spread, POWER_SPREAD), 3), rows=names
    )


def _build_energy_row(row: dict[str, Any], run: ResidualModel, *, calibrates: bool) -> EnergyRow:
    found = CHIPS.search(f"{row['model']} {row.get('hw', '')}")
    total = count_parameters(load_words_model(find_model_words(row["model"], {}))).total
    whole = {
        "id": row["model"],
        "hardware": found[1] if found else "H100",
        "tokens": row.get("tokens") or TOKENS[row["model"]],
        "accel_hours": 1.0,
        "params_total": total,
        "params_active": total,
    }
    one = TimeRow(build_full_run("energy", whole))
    hours, device = run.factor * one.modelled_time, load_device_profile(one.get_option("--device"))
    boards_only = "gpu_energy_mwh" in row
    boards = compute_mean_watts(device, ClusterCosts(host_watts=0)) or 0.0
    watts = boards if boards_only else row.get("w", boards) * row["pue"]
    note = "accelerators only" if boards_only else f"with PUE {row['pue']} and its {row.get('w')} W"
    measured = float(row["gpu_energy_mwh"] if boards_only else row["mwh"])
    return EnergyRow(row["model"], measured, hours * watts / 1e6, calibrates, note)
