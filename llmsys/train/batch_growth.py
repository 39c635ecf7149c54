"""The doublings of a batch that grows by the gradient noise scale (`batch.ramp.kind=noise_scale`).

The batch doubles once the noise scale, averaged over measurements, is at least twice its size over
`max_share` (McCandlish 2018, arXiv:1812.06162, 2.3: a batch near the noise scale is a fair trade of
tokens for steps). It never shrinks. Every doubling is an event `batch_growth`, and every checkpoint
has the doublings so far and the averages, so that a resumed run takes the steps that it would have
taken.

Rank 0 decides for all ranks.

Invariants:
- Steps are functions of the config with the recorded doublings; positions in the data follow from
  them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.run import RunConfig
from llmsys.parallel.process_group import run_on_rank_zero
from llmsys.train.gradient_noise_scale import GradientNoiseScale, NoiseScaleMeter
from llmsys.train.recorded_changes import set_doublings


class BatchGrowth:
    """The doublings of one run, decided from its measurements.

    Args:
        meter: the meter of the noise scale; None: nothing is measured, nor recorded.
        record: the record of the checkpoint that the run continues from; empty for a run that
            begins.

    Attributes:
        last_measurement: measurements before the last doubling.
    """

    def __init__(
        self, meter: NoiseScaleMeter | None = None, record: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.meter = meter
        self.last_measurement = 0
        self.load_record(record)

    def find_growth(self, config: RunConfig, steps_done: int) -> RunConfig | None:
        """Return the config whose batch doubles from the next step on, or None. Collective after
        measured steps.

        Args:
            config: the config with the doublings so far.
            steps_done: steps that are done.
        """
        ramp = config.batch.ramp
        batch = config.batch
        if (
            self.meter is None
            or not isinstance(ramp, NoiseRampConfig)
            or not self.meter.is_due(steps_done)
        ):
            return None
        size = batch.get_step_tokens(steps_done)
        if size == batch.tokens_per_step or steps_done >= config.num_steps:
            return None
        # Sums over ranks may be rounded in another order on each.
        noise = run_on_rank_zero(self._get_noise_tokens)
        if self.meter.scale.measurements - self.last_measurement < ramp.min_measurements:
            return None
        if ramp.max_share * noise < 2 * size:
            return None
        self.last_measurement = self.meter.scale.measurements
        return set_doublings(
            config,
            {"batch_growth": {"doubled_after_steps": [*ramp.doubled_after_steps, steps_done]}},
        )

    def _get_noise_tokens(self) -> float:
        """Return the noise scale in tokens; 0 while it is unknown."""
        return 0.0 if self.meter is None else self.meter.scale.tokens or 0.0

    def describe(self, grown: RunConfig, steps_done: int) -> dict[str, Any]:
        """Return the fields of the event of a doubling, of the config that `find_growth`
        returned.
        """
        batch = grown.batch
        assert isinstance(batch.ramp, NoiseRampConfig)
        return {
            "tokens": batch.count_tokens_before(steps_done),
            "batch_tokens": batch.get_step_tokens(steps_done),
            "noise_scale_tokens": self._get_noise_tokens(),
            "doubled_after_steps": list(batch.ramp.doubled_after_steps),
            "steps": grown.num_steps,
        }

    def build_record(self, config: RunConfig) -> dict[str, Any]:
        """Return what a checkpoint records: the doublings and the averages; empty where nothing
        is measured.
        """
        if self.meter is None or not isinstance(ramp := config.batch.ramp, NoiseRampConfig):
            return {}
        doubled = list(ramp.doubled_after_steps)
        scale = asdict(self.meter.scale)
        growth = {
            "doubled_after_steps": doubled,
            "last_measurement": self.last_measurement,
            "noise_scale": scale,
        }
        return {"batch_growth": growth}

    def load_record(self, record: Mapping[str, Any]) -> None:
        """Continue from the averages of a checkpoint's record; begin anew where it has none."""
        found = record.get("batch_growth", {})
        if self.meter is not None and found:
            self.meter.scale = GradientNoiseScale(**found["noise_scale"])
        self.last_measurement = found.get("last_measurement", 0)
