"""The main content of a page: where it stands, and what within it is something else.

Reads HTML as UTF-8, gives text. Runs in elements that by tag or name are not content are out (`extract.side`); what
reads like paragraphs shows where the content stands (`extract.weigh`); boxes of links, phrases about the page and loose
headings in it go (`extract.within`); the rest is laid out as text (`extract.layout`).
"""

from data_pipeline.extract.layout import render_text
from data_pipeline.extract.page import ElementStats, parse_page
from data_pipeline.extract.weigh import find_root, score_elements
from data_pipeline.extract.within import add_lead, drop_link_boxes, drop_phrases, find_content_siblings, select_kept_runs


def extract_article(html: bytes) -> str:
    """The text of a page's main content; empty when it has none. The caller has checked `extract.limit`."""
    page = parse_page(html)
    return render_text(page.tree, find_main_content(page))


def find_main_content(page: ElementStats) -> list[int]:
    """The runs of the main content, in the order of the page."""
    tree = page.tree
    if not tree.text:
        return []
    weights = score_elements(page)
    root = find_root(page, weights)
    keep = [False] * len(tree.text)
    for element in (root, *find_content_siblings(page, weights, root)):
        for run in range(tree.first[element], tree.last[element]):
            keep[run] = not page.out[run]
    add_lead(page, root, keep)
    drop_link_boxes(page, root, keep)
    drop_phrases(tree, keep)
    return select_kept_runs(tree, keep)
