"""Code of the user's own is known by its source, all of it."""

from pathlib import Path

from llmsys.config.custom_rules import PythonRuleConfig
from llmsys.config.python_code import compute_code_digest


def test_the_digest_is_that_of_all_its_sources(tmp_path: Path) -> None:
    own, words = tmp_path / "my_rules.py", tmp_path / "words.txt"
    own.write_text("class NoRecipes: ...")
    words.write_text("a")
    config = PythonRuleConfig(path=f"{own}:NoRecipes", sources=(words,))
    digests = [compute_code_digest(config)]
    for path in (words, own):
        path.write_text(path.read_text() + " ")
        digests.append(compute_code_digest(config))
    assert len(set(digests)) == 3
    assert config.title == "no_recipes"
