"""A rule for documents, to copy and change. Run this file to test it: python my_rules.py

data:
  rules:
    - kind: python
      path: my_rules.py:NoRecipes
      options: {max_recipe_share: 0.05}
"""

from pydantic import Field

from llmsys.data_pipeline.rules.python_rule import PythonRule, check_python_rule
from llmsys.data_pipeline.rules.rule import ThresholdTest

RECIPE_WORDS = {"teaspoon", "tablespoon", "preheat", "simmer", "whisk", "stir", "oven"}


class NoRecipes(PythonRule):
    """Drop documents with many words of recipes."""

    max_recipe_share: float = Field(
        0.02, ge=0, le=1, description="Maximum of recipe words / words."
    )

    def measure(self, text: str) -> dict[str, float]:
        """Return the statistics of a document; they depend on its text and the options alone."""
        words = text.lower().split()
        return {"recipe_share": sum(word in RECIPE_WORDS for word in words) / max(1, len(words))}

    def list_limits(self) -> list[ThresholdTest]:
        """Return the tests: a name for people, the statistic, the side that is dropped, and the
        threshold.
        """
        return [
            ThresholdTest("share of recipe words", "recipe_share", "above", self.max_recipe_share)
        ]


if __name__ == "__main__":
    check_python_rule(
        NoRecipes(), kept=["The bridge was built in 1871."], dropped=["Preheat the oven and stir."]
    )
    print("the rule keeps and drops as it should")
