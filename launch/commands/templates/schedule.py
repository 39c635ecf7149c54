"""A schedule of the learning rate, to copy and change. Run this file to see it: python
my_schedule.py

schedule:
  kind: python
  path: my_schedule.py:Stairs
  warmup_tokens: 50_000
  options: {steps: 4}
"""

from pydantic import Field

from llmsys.config.schedule import PythonSchedule


class Stairs(PythonSchedule):
    """Halve the learning rate after each of several equal parts of the run."""

    steps: int = Field(3, ge=1, description="Number of parts.")

    def compute_multiplier(self, tokens: float, budget_tokens: float) -> float:
        """Return the share of the peak rate after `tokens` of `budget_tokens` training tokens."""
        return float(0.5 ** min(self.steps - 1, int(self.steps * tokens / budget_tokens)))


if __name__ == "__main__":
    print([Stairs().compute_multiplier(tokens, 100) for tokens in range(0, 101, 10)])
