"""Laws of the article extractor: what stays, in which shape, and what is never text."""

import random

import pytest

from llmsys.data_pipeline.extract.html_tree import parse_tree
from llmsys.data_pipeline.extract.main_content import extract_article

WORDS = [
    "river",
    "mill",
    "stone",
    "bread",
    "winter",
    "market",
    "story",
    "bridge",
    "garden",
    "letter",
    "window",
    "harbour",
    "candle",
    "meadow",
]


def sentence(seed: int, words: int = 18) -> str:
    """A sentence that no other seed makes."""
    draw = random.Random(seed)
    return (
        f"Number {seed} tells of the "
        + " ".join(draw.choice(WORDS) for _ in range(words))
        + ", at length."
    )


def page(content: str, around: str = "") -> bytes:
    links = "".join(f"<li><a href='/{word}'>{word}</a></li>" for word in WORDS)
    return (
        f"<!doctype html><html><head><title>T</title><style>p {{color: red}}</style></head><body>"
        f"<nav><ul>{links}</ul></nav><div class='sidebar'><ul>{links}</ul></div>"
        f"<div class='content'>{content}</div>{around}<footer><p>All rights reserved.</p></footer>"
    ).encode()


def paragraphs(*seeds: int) -> str:
    return "".join(f"<p>{sentence(seed)}</p>\n" for seed in seeds)


def test_the_order_of_the_page_is_kept_and_nothing_around_the_content_stays() -> None:
    text = extract_article(page(paragraphs(*range(8))))
    assert text == "\n\n".join(sentence(seed) for seed in range(8))


def test_plain_text_extracted_again_is_the_same() -> None:
    text = "\n\n".join(sentence(seed) for seed in range(6))
    once = extract_article("".join(f"<p>{block}</p>" for block in text.split("\n\n")).encode())
    assert once == text


@pytest.mark.parametrize(
    "hidden",
    [
        "<script>SECRET</script>",
        "<style>SECRET</style>",
        "<noscript><p>SECRET</p></noscript>",
        "<template><p>SECRET</p></template>",
        "<svg><text>SECRET</text></svg>",
        "<svg><script>SECRET</script></svg>",
        "<!-- <p>SECRET</p> > -->",
        "<!--><p hidden>SECRET</p>",
        "<script><!--<script></script>SECRET</script>",
        "<p title='<p>SECRET</p>'></p>",
        "<iframe><p>SECRET</p></iframe>",
        "<select><option>SECRET</select>",
        "<textarea><p>SECRET</p></textarea>",
        "<div hidden>SECRET</div>",
        "<div style='display: none'>SECRET</div>",
        "<div class='cookie-consent'><p>SECRET: we use cookies on this site, accept "
        "them.</p></div>",
        "<div id='newsletterSignup'><p>SECRET: the best stories in your inbox every day.</p></div>",
        "<p>Subscribe to SECRET, our weekly letter.</p>",
    ],
)
def test_what_readers_do_not_read_is_not_text(hidden: str) -> None:
    text = extract_article(page(paragraphs(0, 1, 2) + hidden + paragraphs(3, 4, 5)))
    assert "SECRET" not in text
    assert text.split("\n\n") == [sentence(seed) for seed in range(6)]


def test_code_is_kept_line_by_line() -> None:
    code = "def f(x):\n    if x &lt; 3 &amp;&amp; y:\n\n        return x  # &amp;amp;"
    text = extract_article(
        page(paragraphs(0, 1) + f"<pre><code>\n{code}\n</code></pre>" + paragraphs(2, 3))
    )
    assert "\n\ndef f(x):\n    if x < 3 && y:\n\n        return x  # &amp;\n\n" in text


def test_code_in_a_table_with_line_numbers_is_code() -> None:
    table = (
        "<table><tr><td class='linenos'><pre>1\n2</pre></td><td class='code'><pre>a = 1\nb = "
        "2</pre></td></tr></table>"
    )
    text = extract_article(page(paragraphs(0, 1) + table + paragraphs(2, 3)))
    assert "\n\na = 1\nb = 2\n\n" in text


def test_lists_have_one_line_per_item() -> None:
    items = (
        "<ul><li>first item<ul><li>inner</li></ul></li><li><p>second</p><p>and more</p></li></ul>"
    )
    text = extract_article(page(paragraphs(0, 1) + items + paragraphs(2, 3)))
    assert "\n\n- first item\n  - inner\n- second\n  and more\n\n" in text


def test_tables_have_one_line_per_row_and_keep_empty_cells() -> None:
    rows = "<tr><th></th><th>A</th><th>B</th></tr><tr><td>x</td><td></td><td>2</td></tr>"
    text = extract_article(page(paragraphs(0, 1) + f"<table>{rows}</table>" + paragraphs(2, 3)))
    assert "\n\n| A | B\nx |  | 2\n\n" in text.replace(" |  | ", " |  | ")


def test_a_line_break_is_a_newline() -> None:
    text = extract_article(
        page(f"<p>{sentence(0)}<br>{sentence(1)}<br><br>{sentence(2)}</p>" + paragraphs(3, 4))
    )
    assert text.startswith(f"{sentence(0)}\n{sentence(1)}\n\n{sentence(2)}")


def test_headings_stay_with_their_text_and_go_without_it() -> None:
    links = "".join(
        f"<li><a href='/{word}'>The {word} that you should read about</a></li>" for word in WORDS
    )
    content = f"<h2>Part</h2>{paragraphs(*range(16))}<h2>Elsewhere</h2><ul>{links}</ul>"
    text = extract_article(page(content))
    assert text.startswith("Part\n\n")
    assert "Elsewhere" not in text


def test_sections_beside_each_other_all_stay() -> None:
    sections = "".join(
        f"<section class='part'><h2>Part {n}</h2>{paragraphs(n, n + 50)}</section>"
        for n in range(5)
    )
    text = extract_article(page(f"<div class='page'>{sections}</div>"))
    assert all(sentence(n) in text and f"Part {n}" in text for n in range(5))


def test_posts_of_a_forum_all_stay() -> None:
    posts = "".join(
        f"<div class='comment'><div class='comment-body'>{paragraphs(n, n + 9)}</div></div>"
        for n in range(4)
    )
    text = extract_article(page(f"<div class='comments'>{posts}</div>"))
    assert all(sentence(n) in text for n in range(4))


def test_comments_under_an_article_go() -> None:
    comments = f"<div id='comments'><p>{sentence(90)}</p><p>{sentence(91)}</p></div>"
    assert sentence(90) not in extract_article(page(paragraphs(*range(8)), comments))


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (
            "<p>one<p>two &amp three &lt; four &notit; &#x110000;",
            "one\n\ntwo & three < four ¬it; �",
        ),
        ("<b><p>unclosed<i>tags</b>everywhere</i>", "unclosedtagseverywhere"),
        ("<table><p>foster</p><tr><td>cell</table>after", "foster\n\ncell\n\nafter"),
        ("</div></p>stray", "stray"),
        ('<a<b c"d=e>odd</a<b>', "odd"),
        ("<p title='a>b' data-x=\"<i>\">quoted", "quoted"),
        ("<xmp><b>raw</b></xmp>", "<b>raw</b>"),
        ("<!-- <xmp> --><p>a</p><xmp><!-- <p>b</xmp><p>c", "a\n\n<!-- <p>b\n\nc"),
        ("x<plaintext><p>a</plaintext></div>", "x\n\n<p>a</plaintext></div>"),
        ("<p>a<!--[if IE]><!-->b<!--<![endif]-->c", "abc"),
        ("<dialog>x<dialog>y</dialog>z</dialog>seen<rp>(</rp>", "seen"),
        ("<body><frameset><p>x", "x"),
    ],
)
def test_broken_markup_is_read_as_browsers_do(html: str, text: str) -> None:
    assert extract_article(html.encode()) == text


def test_attributes_are_written_without_angle_brackets() -> None:
    tree = parse_tree(b"<div title='a>b<c' class=\"x\">text</div>")
    assert tree.text == ["text"]
    assert tree.attributes[2] == ' title="a&gt;b&lt;c" class="x"'


def test_nested_lists_take_time_in_proportion() -> None:
    deep = "<ul><li>" * 2_000 + "the innermost item of the list" + paragraphs(0)
    assert sentence(0) in extract_article(page(deep))


def test_a_name_does_not_put_out_what_holds_most_paragraphs() -> None:
    links = "".join(
        f"<div><a href='/{n}'>The {word} of number {n} in the archive</a></div>"
        for n in range(9)
        for word in WORDS
    )
    post = f"<div class='widget Blog'><div class='date-posts'>{paragraphs(0, 1, 2, 3)}</div></div>"
    text = extract_article(page(links, post))
    assert all(sentence(seed) in text for seed in range(4))


def test_an_aside_goes_unless_it_holds_the_content() -> None:
    assert sentence(9) not in extract_article(
        page(paragraphs(*range(4)) + f"<aside><p>{sentence(9)}</p></aside>")
    )
    assert sentence(9) in extract_article(
        page("<p>Short.</p>", f"<aside>{paragraphs(9, 10, 11, 12)}</aside>")
    )


def test_a_name_does_not_put_out_what_is_large_by_the_aside_in_it() -> None:
    aside = f"<aside>{paragraphs(20, 21, 22)}</aside>"
    text = extract_article(
        page(paragraphs(0, 1, 2, 3), f"<div class='related'>{aside}{paragraphs(10, 11)}</div>")
    )
    assert text.split("\n\n") == [sentence(seed) for seed in (0, 1, 2, 3, 10, 11)]


def test_a_paragraph_beside_the_content_stays_without_marks_of_punctuation() -> None:
    plain = " ".join(WORDS)
    text = extract_article(
        f"<div><h1>The mill</h1><p>{plain}</p><div>{paragraphs(*range(6))}</div></div>".encode()
    )
    assert plain in text.split("\n\n")


def test_a_page_builder_that_calls_all_that_it_builds_a_widget_puts_nothing_out() -> None:
    built = f"<div class='elementor-widget elementor-widget-text'>{paragraphs(9)}</div>"
    text = extract_article(
        page(paragraphs(*range(6)) + built + f"<div class='widget'>{paragraphs(8)}</div>")
    )
    assert sentence(9) in text
    assert sentence(8) not in text


def test_a_sidebar_among_paragraphs_is_a_box_of_the_text() -> None:
    box = f"<div class='sidebar'><p>Note</p><p>{sentence(9)}</p></div>"
    text = extract_article(page(paragraphs(0, 1, 2) + box + paragraphs(3, 4, 5)))
    assert text.split("\n\n") == [
        *map(sentence, range(3)),
        "Note",
        *map(sentence, [9, 3, 4, 5]),
    ]


def test_a_sidebar_beside_the_text_or_without_paragraphs_is_a_column() -> None:
    column = f"<div class='sidebar'><p>{sentence(9)}</p></div>"
    assert sentence(9) not in extract_article(page(paragraphs(*range(6)), column))
    columns = f"<div>{paragraphs(0, 1, 2)}</div>{column}<div>{paragraphs(3, 4, 5)}</div>"
    text = extract_article(page(columns))
    assert text.split("\n\n") == [sentence(seed) for seed in range(6)]
    notes = "".join(f"<p>{word}</p>" for word in WORDS * 3)
    box = f"<div class='sidebar'>{notes}<p>{sentence(9)}</p></div>"
    text = extract_article(page(paragraphs(*range(6)) + box + paragraphs(6, 7)))
    assert sentence(9) not in text


def test_a_hidden_sidebar_goes_wherever_it_stands() -> None:
    box = f"<div class='sidebar' hidden><p>{sentence(9)}</p></div>"
    assert sentence(9) not in extract_article(page(paragraphs(0, 1, 2) + box + paragraphs(3, 4)))


def list_links(words: list[str]) -> str:
    return "".join(f"<li><a href='/{word}'>The {word} of the archive</a></li>" for word in words)


def test_a_list_of_links_that_the_page_is_for_stays_with_its_parts() -> None:
    parts = "".join(
        f"<li><a href='/{n}'>Volume {n} of the archive</a><ul>{list_links(WORDS[n::3])}</ul></li>"
        for n in range(3)
    )
    contents = f"<h1>The archive</h1>{paragraphs(0, 1)}<ul>{parts}</ul>"
    text = extract_article(page(contents))
    assert [word for word in WORDS if f"The {word} of the archive" not in text] == []
    short = f"{paragraphs(*range(16))}<ul>{parts}</ul>"
    assert "of the archive" not in extract_article(page(short))


def test_what_a_forum_says_of_an_author_is_not_the_post() -> None:
    posts = "".join(
        f"<li><div class='posthead'>Date {n}</div><div class='userinfo'>Author {n}</div>"
        f"<div>{paragraphs(n, n + 9)}</div><div class='postfoot'>Reply to {n}</div></li>"
        for n in range(4)
    )
    text = extract_article(page(f"<ol class='posts'>{posts}</ol>"))
    assert all(sentence(n) in text for n in range(4))
    assert not any(word in text for word in ("Date", "Author", "Reply"))


POSTING = '<div itemscope itemtype="https://schema.org/DiscussionForumPosting">'


def test_posts_that_are_called_comments_are_the_content_of_a_forum_alone() -> None:
    posts = "".join(f"<li class='comment'>{paragraphs(seed)}</li>" for seed in range(10, 16))
    # Without the posts enough is left, so that names are trusted.
    thread = f"<div>{paragraphs(0, 1, 2)}</div><ul id='comments'>{posts}</ul>"
    everything = [sentence(seed) for seed in (0, 1, 2, *range(10, 16))]
    forum = extract_article(page(f"{POSTING}{thread}</div>"))
    assert [line.removeprefix("- ") for line in forum.split("\n") if line] == everything
    assert extract_article(page(f"<div>{thread}</div>")) == "\n\n".join(map(sentence, range(3)))


def test_all_posts_of_a_thread_stay_though_one_is_much_longer() -> None:
    long = f"<div class='post-body'>{paragraphs(*range(30))}</div>"
    short = "".join(f"<div class='box{seed}'>{paragraphs(seed)}</div>" for seed in range(30, 34))
    text = extract_article(page(f"{POSTING}<div>{long}</div><div>{short}</div></div>"))
    missing = [seed for seed in range(30) if sentence(seed) not in text]
    assert not missing
    # four fifths of the paragraphs are enough for a thread
    shorter = f"<div class='post-body'>{paragraphs(*range(10))}</div>"
    text = extract_article(page(f"{POSTING}<div>{shorter}</div><div>{short}</div></div>"))
    assert all(sentence(seed) in text for seed in (*range(10), *range(30, 34)))


def test_a_form_around_the_posts_is_no_form_to_fill_in() -> None:
    posts = f"<form action='moderate'>{paragraphs(*range(6))}</form>"
    text = extract_article(page(f"{'<p>Short.</p>' * 400}{posts}"))
    assert all(sentence(seed) in text for seed in range(6))
    reply = f"<form action='reply'>{paragraphs(9)}</form>"
    assert sentence(9) not in extract_article(page(f"{paragraphs(*range(6))}{reply}"))


def test_a_page_that_scripts_draw_has_the_text_of_readers_without_scripts() -> None:
    frame = "<div id='app'>Loading the forum</div>"
    text = extract_article(f"{frame}<noscript>{paragraphs(0, 1, 2)}</noscript>".encode())
    assert text == "Loading the forum\n\n" + "\n\n".join(map(sentence, range(3)))
    article = extract_article(f"{paragraphs(0, 1)}<noscript>{paragraphs(2)}</noscript>".encode())
    assert article == "\n\n".join(map(sentence, range(2)))
    request = extract_article(f"{frame}<noscript>Please allow scripts.</noscript>".encode())
    assert request == "Loading the forum"
    style = "<style>" + "a {color: red} " * 99 + "</style>"
    assert extract_article(f"{frame}<noscript>{style}Allow.</noscript>".encode()) == request


def test_a_listing_keeps_its_links_and_only_its_main_part() -> None:
    items = "".join(
        f"<div><a href='/{word}'>The {word} of the old town</a> <b>{number} kr</b></div>"
        for number, word in enumerate(WORDS)
    )
    around = "".join(f"<p><a href='/{word}/all'>Everything: {word}</a></p>" for word in WORDS)
    main = f"<main><h1>Old town</h1><p>Sorted by name.</p>{items}</main>"
    html = f"<div>{around}</div>{main}"
    text = extract_article(html.encode())
    assert text.startswith("Old town\n\nSorted by name.\n\nThe river of the old town 0 kr\n\n")
    assert text.count("old town") == len(WORDS)
    assert "Everything" not in text
    named = html.replace("<main>", '<div role="main">').replace("</main>", "</div>")
    assert extract_article(named.encode()) == text


def test_a_small_main_part_is_not_taken_for_the_page() -> None:
    items = "".join(f"<li><a href='/{word}'>The {word} of the old town</a></li>" for word in WORDS)
    text = extract_article(f"<main><p>Sorted.</p></main><div><ul>{items}</ul></div>".encode())
    assert text.count("old town") == len(WORDS)


def test_reviews_are_content_unless_the_page_names_a_product() -> None:
    reviews = f"<div class='reviews'>{paragraphs(7, 8)}</div>"
    text = extract_article(page(f"<div>{paragraphs(0, 1, 2, 3)}{reviews}</div>"))
    assert text == "\n\n".join(map(sentence, (0, 1, 2, 3, 7, 8)))
    product = '<script type="application/ld+json">{"@type": "Product"}</script>'
    text = extract_article(page(f"<div>{paragraphs(0, 1, 2, 3)}{reviews}</div>", product))
    assert text == "\n\n".join(map(sentence, range(4)))
