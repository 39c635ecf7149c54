"""Pages that parsers and extractors disagree about: random pieces of HTML, and real pages with
random changes.
"""

import random
from collections.abc import Sequence

from llmsys.config.cleaning import ArticleExtractorConfig
from llmsys.data_pipeline.extract.extractor import _find_page_violation

SPACES = [
    " ", "\x85", "\u3000", "\u2028", "\x1c", "\x0b", "&nbsp;", "&#160;", "&amp;lt;", "&lt;b&gt;",
    "ſ", "K", "İ", "ı", "É", "é", "，", "。", "¶", "👉", "٣", "²", "\ufeff", "&#x80;",
    "&#13;", "\r\n",
    "\t", "e\u0301", "\ud7ff", "�", "\xa0", "&quot;", "\u1680", "\u205f", "\ufffe", "\x7f", "\x01",
]  # fmt: skip
PIECES = [
    "<!doctype html>", '<div class="post-body">', "<div hidden=>", '<p style="display:\u3000none">',
    "</div>", "<p>", "<li>", "<ul>", "<ol>", "<table><tr><td>", "<td>", "<tr>", "<pre>", "</pre>",
    "<br>", "<hr>", "<a href=x>", "<a id=1>", "</a>", "<!-- x <p> -->", "<!-->", "<!--a--!>",
    "<?xml x?>", "<h2>Read more</h2>", "<p>Click here now</p>", "<p>Source: x</p>",
    "<p>Follow @x</p>", "<p>© 2020</p>", "<p>CLICK here</p>", "<svg><p>x</svg>",
    "<object>o<object>p</object></object>", "<textarea><p>x</textarea>", "<header>", "</header>",
    "<footer>", "<aside>", "<form>", "<article>", "<main>", '<body class="single postid-12 x">',
    '<div id="post-12">', "<p>Tags: x</p>", "</table>",
    '<div class="postBody elementor-widget sideBarAd">', '<section class="lineno Related">',
    "<nav>n</nav>", "<button>b</button>", "<script>if(a<b)</script>", "<noscript><p>n</noscript>",
    "<select><option>o</select>", "<x-y>", "<p/>", '<div a="x>y<z&quot;">', "<b>", "</b>",
    "<template><p>t</template>", "<details><summary>s</summary>", "<dl><dt>a<dd>b",
    "<video>v</video>", "<frameset>", "<title>t</title>", "<p><b><i>", "<figure><figcaption>c",
    "<blockquote>", '<div aria-hidden="true">', '<em is="x-y" id="q">', '<li is="w">', "</p>",
    "<div ıd=\"x\" CLASS='comment \"q\"'>", "<td\x85>", "</td\x85>", "<p\u3000class=ad>", "</ul>",
    "<li class=body-text>", "<iframe>f</iframe>", "</br>",
    '<svg xlink:href="x"><a href=y>z</a></svg>', "<h1>T",
    "<th>h</th>", "<caption>c", "<menu>", "<legend>l", "<center>", "<nobr>", "<font>", "<rp>r</rp>",
    "x<sup>2</sup>", "<sup>", "</sup>", "<sub>i</sub>", "</sub>", "10<sup>\u22126</sup>",
    "1<sup>1</sup>/<sub>2</sub>", "3<sup>12</sup>⁄", "text<sup>1</sup>", "км<sup>n+1</sup>",
    "<sup><a href=n>2</a></sup>", "<a href=n><sup>2</sup></a>", "<ol reversed>", "</ol>", "</li>",
    "<ol start=' -3x'>", "<ol start=99999999999>", "<li value=7>", "<img src=x class=y>",
    '<div role="main">', "</main>", "<div itemtype=https://schema.org/DiscussionForumPosting>",
    "<li class=comment>", "<div class=signature>", "</noscript>", "<li class=userReview>",
    '<div itemtype="https://schema.org/Product">',
]  # fmt: skip
# The compiled core leaves pages with these to Python.
LEFT = [
    "<math><mi>x</mi><annotation>z</annotation></math>", "<script type=Math/tex>x</script>",
    "<img class='a latex'>", "<span class=katex><img src='/math/render/1' alt=x></span>",
    "<xmp><p>raw</xmp>", "<plaintext>", '<body class="postid-12é">', "<p>CLICK hereé</p>",
    "<p>Read moreß and</p>", '<math xml:lang="de"><section>f</section></math>',
    "<noscript><form><p>n", "<noscript><object>o",
    f"<noscript><p>{'For readers without scripts, at length. ' * 20}</noscript>",
]  # fmt: skip
# What decides about superscripts and numbers of lists.
STRUCTURE = [
    "<sup>", "</sup>", "<sub>", "</sub>", "<sup>2</sup>", "<sub>i</sub>", "<sup>-1</sup>",
    "<sup>n+1</sup>", "<sup>st</sup>", "<sup\x85>", "x", "m", "km", "Li", "word", "sin", "10",
    "1999", "2", "1", "(", ")", "[", "]", "{", "}", "_", "^", "/", "⁄", " ", "&nbsp;", "\u2003",
    "−", "–", "+", "-", "*", "†", ",", ".", "=", "∞", "'", "é", "λ", "ς", "ϑ", "ο", "Σ", "Б", "Ё",
    "км", "µ", "º", "ſ", "𝔼", "o", "e", "t", "T", "(n)", "&lt;", "&amp;", "<a href=x>", "</a>",
    "<a id=1>", "<b>", "</b>", "<br>", "<p>", "</p>", "<!-- c -->", "<ol>", "<ol start=5>",
    "<ol reversed>", "<ol reversed start=-3>", "<ol start='99999999999'>", "<ol start=' +7x'>",
    "<li>", "<li value=7>", "<li value='-2'>", "</li>", "</ol>", "<ul>", "</ul>", "<pre>",
    "</pre>", "<table><tr><td>", "<td>", "</table>", "1<sup>1</sup>/<sub>2</sub>",
    "3<sup>12</sup>⁄<sub>16</sub>", "2^3/", "{12}/", "1234567890" * 5, "abcdefghij" * 5,
    "<object>o</object>", "<script>s</script>", "<img src=x>", "<h2>H</h2>",
]  # fmt: skip
SENTENCE = "Some long sentence, which reads like prose; it has marks. "


def change_page(source: random.Random, html: bytes) -> str:
    """Return a page with up to 150 random changes."""
    text = html.decode()
    if len(text) > 30_000:
        start = source.randrange(len(text) - 30_000)
        text = text[:2_000] + text[start : start + 28_000]
    for _ in range(source.choice((1, 3, 10, 40, 150))):
        kind = source.random()
        place = source.randrange(len(text) + 1)
        if kind < 0.35:
            text = text[:place] + source.choice(PIECES) + text[place:]
        elif kind < 0.6:
            text = text[:place] + source.choice(SPACES) * source.choice((1, 1, 3)) + text[place:]
        elif kind < 0.75:
            text = text[:place] + text[place + source.choice((1, 5, 50, 400)) :]
        elif kind < 0.85:
            other = source.randrange(len(text) + 1)
            copied = text[other : other + source.choice((20, 300))]
            text = text[:place] + copied + text[place:]
        else:
            text = text[:place] + write_pieces(source, 30, 8) + text[place:]
    return text


def write_pieces(source: random.Random, count: int, sentences: int) -> str:
    """Return random pieces of HTML and sentences."""
    pieces = PIECES + SPACES + [SENTENCE] * sentences
    return "".join(source.choices(pieces, k=count))


def list_hostile_pages(seed: int, count: int, pages: Sequence[bytes]) -> list[bytes]:
    """Return pages within the limits of the extractor: changed ones of `pages`, and random ones."""
    source = random.Random(seed)
    config = ArticleExtractorConfig()
    made: list[bytes] = []
    while len(made) < count:
        if pages and source.random() < 0.8:
            text = change_page(source, source.choice(pages))
        else:
            text = write_pieces(source, source.choice((5, 60, 400)), 12)
        if source.random() < 0.02:
            text = source.choice(LEFT) + text
        html = text.encode("utf-8", "replace").replace(b"\0", b"")
        if _find_page_violation(html, config) is None:
            made.append(html)
    return made


def list_structured_pages(seed: int, count: int) -> list[bytes]:
    """Return pages of random superscripts, subscripts, lists, and what they depend on."""
    source = random.Random(seed)
    return [
        "".join(source.choices(STRUCTURE, k=source.choice((3, 8, 30, 120)))).encode()
        for _ in range(count)
    ]
