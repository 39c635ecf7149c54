"""Words of `llmsys scale fit`."""

import pytest

from llmsys.launch.main import main


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("device=h100-sxm", "Leave it out."),
        ("bugdet=1e21", "Did you mean budget=1e21?"),
    ],
)
def test_a_key_that_a_fit_does_not_have_is_refused(word: str, advice: str, capsys) -> None:
    assert main(["scale", "fit", "ladder.csv", word]) == 2
    text = capsys.readouterr().err
    assert f"{word} changes nothing in llmsys scale fit" in text
    assert advice in text
