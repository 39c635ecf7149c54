"""Superscripts are marked where they are mathematics, and nothing else changes."""

import pytest

from llmsys.data_pipeline.extract.main_content import extract_article


def extract(html: str) -> str:
    return extract_article(f"<p>{html}</p>".encode())


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("x<sup>2</sup>", "x^2"),
        ("E = mc<sup>2</sup>", "E = mc^2"),
        ("12 cm<sup>3</sup>/s", "12 cm^3/s"),
        ("10<sup>23</sup>", "10^{23}"),
        ("10<sup>1</sup>", "10^1"),
        ("10<sup>−6</sup>", "10^{-6}"),
        ("mol<sup>-1</sup>", "mol^{-1}"),
        ("person<sup>-1</sup>", "person^{-1}"),
        ("sin<sup>2</sup> x", "sin^2 x"),
        ("Na<sup>+</sup>, Ca<sup>2+</sup>", "Na^+, Ca^{2+}"),
        ("x<sup>n</sup>, 2<sup>n</sup>, A<sup>T</sup>", "x^n, 2^n, A^T"),
        ("e<sup>iπ</sup>", "e^{iπ}"),
        ("e<sup>2iπ</sup>", "e^{2iπ}"),
        ("x<sup>n + 1</sup>", "x^{n + 1}"),
        ("f<sup>(n)</sup>", "f^{(n)}"),
        ("(a + b)<sup>2</sup>", "(a + b)^2"),
        ("V<sub>max</sub><sup>2</sup>", "V_{max}^2"),
        ("км<sup>2</sup>", "км^2"),
        ("λ<sup>2</sup>", "λ^2"),
        ("x<sup><i>2</i></sup>y", "x^2y"),
        ("x<sup> 2 </sup>y", "x^2 y"),
        ("a<sup>b<sup>2</sup></sup>", "a^{b^2}"),
        ("2<sup>2<sup>n</sup></sup>", "2^{2^n}"),
        ("<a href=x>E=mc<sup>2</sup></a>", "E=mc^2"),
        ("H<sub>2</sub>O", "H_2O"),
        ("x<sub>i,j</sub>", "x_{i,j}"),
        ("log<sub>10</sub> x", "log_{10} x"),
        ("1<sup>1</sup>/<sub>2</sub> cups", "1 1/2 cups"),
        ("3<sup>12</sup>⁄<sub>16</sub> in", "3 12⁄16 in"),
    ],
)
def test_mathematics_is_marked(html: str, text: str) -> None:
    assert extract(html) == text


@pytest.mark.parametrize(
    "html",
    [
        "text<sup>1</sup>",
        "text<sup>2</sup>, the<sup>3</sup>",
        "text.<sup>2</sup>",
        "text <sup>2</sup>",
        "“text”<sup>3</sup>",
        "x<sup>1</sup>",
        "in 1999<sup>2</sup>",
        "(as he says)<sup>2</sup>",
        "Li<sup>2</sup> and Wu<sup>3</sup>",
        "x<sup><a href=#n>2</a></sup>",
        "x<a href=#n><sup>2</sup></a>",
        "x<sup>[2]</sup>",
        "x<sup>2,3</sup>",
        "x<sup>*</sup>",
        "25<sup>1)</sup>",
        "25<sup>(1)</sup>",
        "1<sup>st</sup>, 2<sup>nd</sup>",
        "2<sup>e</sup>, 1<sup>er</sup>, 3<sup>a</sup>",
        "N<sup>o</sup>, n<sup>o</sup>, M<sup>e</sup>, D<sup>r</sup>",
        "XIX<sup>e</sup>",
        "19<sup>ος</sup>, 5<sup>η</sup>",
        "x<sup>ab</sup>",
        "Name<sup>TM</sup>",
        "Disney<sup>+</sup>",
        "<sup>14</sup>C",
        "<sup>1</sup>/<sub>2</sub>",
        "x<sup>2<br>3</sup>",
        "文<sup>2</sup>",
        "x<sup></sup>y",
        "x<sup>" + "2" * 25 + "</sup>",
        "x<sub>a long explanation</sub>",
        "x<sub>†</sub>",
    ],
)
def test_notes_ordinals_and_names_stay_as_they_are(html: str) -> None:
    plain = html.replace("<sup>", "").replace("</sup>", "")
    plain = plain.replace("<sub>", "").replace("</sub>", "")
    assert extract(html) == extract(plain)
    assert "^" not in extract(html)


def test_code_stays_as_it_is() -> None:
    assert extract_article(b"<pre>x<sup>2</sup> = 1</pre>") == "x2 = 1"


def test_a_block_inside_of_a_superscript_ends_it() -> None:
    text = extract_article(b"<div>x<sup>a<p>y</p>b<sup>2</sup>c</sup>d</div>")
    assert text == "xa\n\ny\n\nb^2cd"


def test_many_and_deep_superscripts_take_bounded_time() -> None:
    assert extract("x<sup>2</sup> " * 30_000).count("x^2") == 30_000
    assert extract("x<sup>" * 2_000 + "y" * 200_000).count("^") == 0
    assert extract("<sup>" * 500 + "<a href=x>y</a>" * 20_000) == "y" * 20_000
