"""Formulas are kept as LaTeX in whatever encoding a page has them, and in bounded time."""

from typing import Any

import pytest
import yaml
from selectolax.lexbor import LexborHTMLParser

from llmsys.data_pipeline.extract.extractor import clean_text
from llmsys.data_pipeline.extract.formulas import may_hold_formulas
from llmsys.data_pipeline.extract.main_content import extract_article
from llmsys.data_pipeline.extract.mathml import convert_mathml
from llmsys.data_pipeline.extract.tex import TexSource, normalize_tex
from tests.helpers.stage_digest import ROOT

PAGES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "data" / "formula_pages.yaml").read_text()
)
SENTENCE = "<p>Some long sentence, which reads like prose; it has marks.</p>"


def extract(html: str) -> str:
    return clean_text(extract_article(html.encode()))


@pytest.mark.parametrize("page", PAGES, ids=[page["name"] for page in PAGES])
def test_every_formula_of_a_page_is_kept_once(page: dict[str, Any]) -> None:
    for html in (page["html"], SENTENCE * 3 + page["html"] + SENTENCE * 3):
        text = extract(html)
        assert [formula for formula in page["kept"] if formula not in text] == []
        assert [formula for formula in page["kept"] if text.count(formula) > 1] == []
        assert [part for part in page.get("gone", ()) if part in text] == []


def test_the_pages_are_many() -> None:
    assert len(PAGES) >= 50
    assert sum(len(page["kept"]) for page in PAGES) >= 80


def test_a_page_without_marks_of_formulas_is_not_searched() -> None:
    assert not may_hold_formulas(b"<p>text of the mathematics page<script>x</script><img src=x>")
    unmarked = [page for page in PAGES if not may_hold_formulas(page["html"].encode())]
    assert {page["name"] for page in unmarked if "<su" not in page["html"]} == {
        "LaTeX in plain text",
        "pictures are no formulas",
    }


@pytest.mark.parametrize(
    ("source", "tex"),
    [
        ("  x\n + 1 ", TexSource("x + 1", False)),
        ("$$x$$", TexSource("x", True)),
        ("\\[x\\]", TexSource("x", True)),
        ("\\(x\\)", TexSource("x", False)),
        ("$a$ and $b$", TexSource("$a$ and $b$", False)),
        ("$latex x$", TexSource("x", False)),
        ("{\\displaystyle {x}}", TexSource("{x}", False)),
        ("{\\displaystyle x}+{y}", TexSource("{\\displaystyle x}+{y}", False)),
        ("\\displaystyle x", TexSource("x", False)),
        ("\\displaystylex", TexSource("\\displaystylex", False)),
        ("5\\% of\nx % note\ny", TexSource("5\\% of x y", False)),
        ("% <![CDATA[\na<b %]]>", TexSource("a<b", False)),
        ("<![CDATA[a]]>", TexSource("a", False)),
        (" \n", TexSource("", False)),
        ("$$", TexSource("$$", False)),
    ],
)
def test_latex_is_brought_into_one_line_without_delimiters(source: str, tex: TexSource) -> None:
    assert normalize_tex(source) == tex


@pytest.mark.parametrize(
    ("mathml", "tex"),
    [
        ("<mi>a</mi><mi>α</mi><mi>b</mi>", "a\\alpha b"),
        ("<mfrac><mi>a</mi></mfrac>", "\\frac{a}{}"),
        ("<msup><mi>a</mi></msup>", "a"),
        ("<msup><mi>ab</mi><mi>c</mi></msup>", "\\mathrm{ab}^c"),
        ("<mfrac bevelled='true'><mi>a</mi><mi>b</mi></mfrac>", "a/b"),
        ("<maction><mi>a</mi><mi>b</mi></maction>", "a"),
        ("<mtext> </mtext><mi>a</mi>", "a"),
        ("<ms>50 %</ms>", "\\text{50 \\%}"),
        ("<mi>{</mi><mo>\\</mo>", "\\{\\backslash"),
        ("text<mi>a</mi>", "texta"),
        ("<mspace width='1em'/><mi>a</mi>", "a"),
        ("", ""),
    ],
)
def test_mathml_becomes_latex(mathml: str, tex: str) -> None:
    math = LexborHTMLParser(f"<p><math>{mathml}</math>").css_first("math")
    assert math is not None
    assert convert_mathml(math) == tex


def test_a_class_of_the_page_is_not_taken_for_a_wrapper() -> None:
    page = f"<body class='katex mwe-math-element'><div class='tex'>{SENTENCE * 4}"
    text = extract(page + "<p>so <math><mi>x</mi></math> is</p>")
    assert text.count("reads like prose") == 4
    assert text.endswith("so $x$ is")


def test_what_is_not_read_leaves_no_formula() -> None:
    hidden = (
        "<noscript><img class=latex alt=SECRET></noscript>"
        "<span class=mwe-math-element><noscript><img class=latex alt=SECRET></noscript></span>"
        "<nav><math><mi>SECRET</mi></math></nav>"
        "<span class=katex><svg class=katex-mathml><math><mi>SECRET</mi></math></svg></span>"
    )
    assert "SECRET" not in extract(f"{SENTENCE}{hidden}{SENTENCE}")


@pytest.mark.parametrize(
    "html",
    [
        "<math>" + "<mrow>" * 3_000 + "<mi>x</mi>",
        "<math>" + "<mfrac><mn>1</mn>" * 1_500,
        "<math>" + "<msqrt>" * 90 + "<mi>x</mi>" * 20_000,
        "<math><mi>" * 1_500 + "x" * 10_000,
        "<math><annotation-xml encoding='text/html'><div>" * 500 + "x",
        "<math><semantics><mi>x</mi><annotation encoding='application/x-tex'>" + "{a\n % " * 99_999,
        "<math alttext='" + "{\\displaystyle " * 99_999 + "'><mi>x</mi></math>",
        "<math><mmultiscripts><mi>x</mi>" + "<mn>1</mn>" * 40_000,
        "<math><mtable>" + "<mtr><mtd><mi>x</mi>" * 20_000,
        "<script type=math/tex>x</script>" * 20_000,
        "<span class=MathJax_Preview>x</span>" * 20_000 + "<script type=math/tex>x</script>" * 9,
        "<span class=katex><span class=katex-mathml><math><mi>x</mi></math></span></span>" * 9_000,
        "<span class=mwe-math-element>" * 2_000 + "<math><mi>x</mi></math>" * 500,
        "<img src='http://latex.codecogs.com/gif.latex?" + "\\large " * 50_000 + "'>",
        "<script type=math/tex>%" + " " * 999_999 + "</script>",
    ],
    ids=lambda html: html[:60],
)
def test_hostile_formulas_are_converted_in_bounded_space(html: str) -> None:
    """Time is bounded too: the quadratic steps that are avoided would take minutes here."""
    text = extract(SENTENCE * 3 + html)
    assert text.count("reads like prose") == 3
    assert len(text) <= 4 * len(html) + 1_000
