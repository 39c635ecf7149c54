"""What every rule on documents has: a name, by which funnel, reasons, columns and commands know it.

Reads nothing, gives the base of the rules' sections. A rule is called by its kind unless it says otherwise, which it
must when its kind stands in a config twice: two lists of words, two scores of a classifier.
"""

from collections.abc import Collection, Iterator, Sequence

from pydantic import Field

from llmsys.config.section import Section
from llmsys.config.violation import Violation


class NamedRuleConfig(Section):
    """One rule; `kind` is the field of each."""

    name: str = Field(
        "",
        pattern="^([a-z][a-z0-9_]*)?$",
        max_length=60,
        description="What the rule is called in funnel, reasons and columns; empty: as its kind.",
    )

    @property
    def title(self) -> str:
        """The name, or else the kind."""
        return self.name or str(getattr(self, "kind", ""))


def find_name_violations(rules: Sequence[NamedRuleConfig], taken: Collection[str]) -> Iterator[Violation]:
    """The rules that would be counted together with another, or with something else that has one of the `taken` names.

    A name that is another rule's kind counts as taken: what `gopher_quality` is must not depend on the config.
    """
    names = [rule.title for rule in rules]
    for number, (rule, name) in enumerate(zip(rules, names, strict=True)):
        if name in names[:number]:
            first = names.index(name)
            yield Violation(
                f"rules.{number}",
                f"{name} stands at rules.{first} already, and what a rule drops is counted by its name. Give it a name "
                f"of its own, such as name: {name}_2.",
            )
        elif rule.name and name in taken and name != getattr(rule, "kind", ""):
            yield Violation(
                f"rules.{number}.name",
                f"{name} is what a stage or another kind of rule is called. Take another name, such as my_{name}.",
            )
