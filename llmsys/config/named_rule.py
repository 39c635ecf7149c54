"""Base section of all document rules: the name used in the funnel, drop reasons, columns and commands.

The default name is the kind. A rule needs an explicit name when a config has two rules of its kind, such as two word
lists or two classifier scores.
"""

from collections.abc import Collection, Iterator, Sequence

from pydantic import Field

from llmsys.config.section import Section
from llmsys.config.violation import Violation


class NamedRuleConfig(Section):
    """One rule. Subclasses add the `kind` field."""

    name: str = Field(
        "",
        pattern="^([a-z][a-z0-9_]*)?$",
        max_length=60,
        description="Name of the rule in funnel, reasons and columns. Empty: its kind.",
    )

    @property
    def title(self) -> str:
        """The name, or the kind if the name is empty."""
        return self.name or str(getattr(self, "kind", ""))


def find_name_violations(rules: Sequence[NamedRuleConfig], taken: Collection[str]) -> Iterator[Violation]:
    """Yield a violation for every rule whose name is already used by another rule or is in `taken`."""
    names = [rule.title for rule in rules]
    for number, (rule, name) in enumerate(zip(rules, names, strict=True)):
        if name in names[:number]:
            first = names.index(name)
            yield Violation(
                f"rules.{number}",
                f"{name} is already the name of rules.{first}, and drops are counted by name. Give it another "
                f"name, such as name: {name}_2.",
            )
        # Another rule's kind counts as taken: the meaning of `gopher_quality` must not depend on the config.
        elif rule.name and name in taken and name != getattr(rule, "kind", ""):
            yield Violation(
                f"rules.{number}.name",
                f"{name} is the name of a stage or of another kind of rule. Use another name, such as my_{name}.",
            )
