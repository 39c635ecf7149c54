"""Reference page of every rule for documents, from the members of `RuleConfig` and the tests of
the built rules.
"""

import inspect

from pydantic import ValidationError

from llmsys.config.quality_rules import RuleConfig
from llmsys.config.section import get_kind, list_section_types
from llmsys.data_pipeline.rules.chain import list_thresholds
from llmsys.data_pipeline.rules.rule import ThresholdTest
from tools.docs.config_reference import FOLDER, Section, format_default
from tools.docs.markdown import format_anchor, format_docstring, format_table, format_text


def list_default_tests(rule: Section) -> list[ThresholdTest]:
    """Return the tests of a rule with its published thresholds; none where it needs a model or a
    list of yours.
    """
    try:
        return list(list_thresholds(rule()))  # type: ignore[arg-type]
    except ValidationError:
        return []


def format_rule(rule: Section) -> str:
    """Return the section of one rule: its docstring, its tests in order, and its keys."""
    kind = get_kind(rule) or ""
    tests = [
        (f"{one.test}", f"{one.drop_side} {one.threshold:g}") for one in list_default_tests(rule)
    ]
    parts = [f"## {kind} {{#{format_anchor(kind)}}}", format_docstring(inspect.getdoc(rule))]
    if tests:
        rows = [(format_text(test), limit) for test, limit in tests]
        parts.append(
            "Tests, in order:\n\n" + format_table(("a document is dropped for its", "if"), rows)
        )
    keys = [
        (f"`{name}`", format_default(field), format_text(field.description or ""))
        for name, field in rule.model_fields.items()
        if name != "kind"
    ]
    parts.append("Keys:\n\n" + format_table(("key", "default", "meaning"), keys))
    return "\n\n".join(parts)


def format_page() -> str:
    """Return the page."""
    rules = list_section_types(RuleConfig)
    first = (
        "# Rules\n\n`data.rules` is a list; each entry has a `kind:` and the keys that differ "
        "from the published values. A rule sees only the documents that the rules before it "
        "kept. Every dropped document is stored with rule, test, value and threshold: `llmsys "
        "inspect DATASET --dropped rule=KIND`. Limits are strict: a value equal to its threshold "
        f"is kept. The section in a config: [`data.rules`](../{FOLDER.split('/')[-1]}/data.md)."
    ).replace("../config", "config")
    return "\n\n".join([first, *(format_rule(rule) for rule in rules)]) + "\n"
