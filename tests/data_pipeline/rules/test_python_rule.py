"""A rule of the user's own is a rule: validated, fingerprinted, in funnel, explain and sweep;
mistakes are named.
"""

from pathlib import Path

import pytest

from llmsys.config.custom_rules import PythonRuleConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.inspection.explain_page import explain_url
from llmsys.data_pipeline.inspection.threshold_sweep import sweep_threshold
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.rules.python_rule import (
    LoadedPythonRule,
    check_python_rule,
    load_python_rule,
)
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from llmsys.dataset.manifest import Manifest
from llmsys.errors import ConfigError, DataError, LlmsysError
from llmsys.launch.commands.templates.rule import NoRecipes
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import make_crawl

TEMPLATE = (ROOT / "launch/commands/templates/rule.py").read_text()
# drops by the share of a word of the tiny crawl
OWN = TEMPLATE.replace('"teaspoon"', '"river", "teaspoon"')


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my_rules.py").write_text(OWN)
    return tmp_path


def prepare(**options: float) -> Manifest:
    """The manifest of the documents of a tiny crawl under the rule."""
    rule = {"kind": "python", "path": "my_rules.py:NoRecipes", "options": options}
    data = {
        "folder": "made",
        "inputs": ["crawl/*.warc.gz"],
        "executor": {"kind": "inline"},
        "rules": [rule],
    }
    return prepare_dataset(
        RunConfig.model_validate({"data": {"kind": "crawl"} | data}), "documents"
    )


def test_its_drops_values_and_thresholds_are_those_of_any_rule(in_folder: Path) -> None:
    make_crawl(Path("crawl"), files=1, pages=12)
    manifest = prepare(max_recipe_share=0.018)
    [stage] = [stage for stage in manifest.funnel if stage.stage == "no_recipes"]
    dropped = stage.documents_in - stage.documents_out
    assert 0 < dropped < stage.documents_in
    found = sweep_threshold(Path("made"), "no_recipes.max_recipe_share=0.018,0.5")
    assert (found.test, found.now) == ("share of recipe words", (0.018,))
    assert [row.might_return for row in found.values] == [0, dropped]
    steps = [
        step
        for number in range(12)
        for page in explain_url(load_config_of("made"), f"https://example-0.org/{number}")
        for step in page.steps
        if step[0] == "no_recipes"
    ]
    assert any(
        "recipe_share" in details and "[to 0.018]" in details
        for _, verdict, details in steps
        if verdict == "stays"
    )
    assert any(
        "share of recipe words" in details and "> 0.018" in details
        for _, verdict, details in steps
        if verdict == "dropped"
    )
    # another source is another dataset
    Path("my_rules.py").write_text(OWN.replace("river", "nothing"))
    assert prepare(max_recipe_share=0.018).documents != manifest.documents


def load_config_of(folder: str):
    return load_run_config(folder).data


def test_the_template_and_its_kit_agree() -> None:
    check_python_rule(NoRecipes(), kept=["A text."], dropped=["Stir it in the oven."])
    with pytest.raises(
        AssertionError, match=r"'A text.' is kept: it measures \{'recipe_share': 0.0\}"
    ):
        check_python_rule(NoRecipes(), kept=[], dropped=["A text."])

    class Counting(NoRecipes):
        def measure_all(self, texts):
            return {"recipe_share": [float(number) for number in range(len(texts))]}

    with pytest.raises(AssertionError, match=r"among other texts and .* alone"):
        check_python_rule(Counting(), kept=["one", "two"], dropped=[])


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere.py:NoRecipes", {}, "nowhere.py cannot be read"),
        (
            "my_rules.py:NoRecipe",
            {},
            "my_rules.py has no class NoRecipe that extends PythonRule. Use one of these: "
            "NoRecipes",
        ),
        (
            "my_rules.py:NoRecipes",
            {"max_recipe_shares": 1},
            "max_recipe_shares: unknown key. Did you mean max_recipe_share?",
        ),
        (
            "my_rules.py:NoRecipes",
            {"max_recipe_share": 3},
            "3 is too large: the maximum is 1. Use 1 or less",
        ),
        (
            "bare.py:Bare",
            {},
            "bare.py:Bare has no list_limits and no measure. Write def list_limits",
        ),
        ("broken.py:A", {}, "broken.py cannot be imported: SyntaxError"),
        (
            "raising.py:A",
            {},
            "raising.py cannot be imported: ZeroDivisionError: division by zero, line 2",
        ),
        (
            "no_such_package.rules:A",
            {},
            "there is no Python module no_such_package.rules",
        ),
        ("not_an_entry", {}, "'not_an_entry' is no entry point of the group llmsys"),
        (
            "empty.py:Empty",
            {},
            "list_limits returned [], which drops nothing. Return at least one ThresholdTest",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_named(
    in_folder: Path, path: str, options: dict[str, float], message: str
) -> None:
    Path("bare.py").write_text(OWN.partition("class ")[0] + "class Bare(PythonRule):\n    pass\n")
    Path("broken.py").write_text("class A(:\n")
    Path("raising.py").write_text("\n1 / 0\n")
    Path("empty.py").write_text(
        OWN.replace("class NoRecipes", "class Empty").replace("return [\n", "return [] and [\n")
    )
    with pytest.raises(LlmsysError) as caught:
        load_python_rule(PythonRuleConfig(path=path, options=options))
    assert message in str(caught.value)


@pytest.mark.parametrize("path", ["a.py:b c", "a.py:", "", "a:b:c"])
def test_a_path_without_a_class_is_refused_with_the_config(path: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"is not FILE\.py:Class or package\.module:Class\. Use, say, my_rules\.py:NoRecipes",
    ):
        load_run_config("train/demo", [f'data.rules=[{{kind: python, path: "{path}"}}]'])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'recipe_share': 1 / 0}", "ZeroDivisionError: division by zero, line"),
        ("return {'other': 1.0}", "measured other, but its limits use recipe_share"),
        ("return {'recipe_share': 'many'}", "ValueError: could not convert string to float"),
    ],
)
def test_an_error_on_a_document_names_its_line_and_text(
    in_folder: Path, body: str, message: str
) -> None:
    Path("my_rules.py").write_text(OWN.replace("words = text.lower().split()", body))
    rule = LoadedPythonRule(PythonRuleConfig(path="my_rules.py:NoRecipes"))
    with pytest.raises(DataError) as caught:
        rule.apply(DocumentBatch(["A document."], WordSplitters()))
    assert message in str(caught.value)
    assert "my_rules.py:NoRecipes" in str(caught.value)
