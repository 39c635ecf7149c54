"""An extractor of text from HTML, to copy and change. Run this file to test it: python
my_extractors.py

data:
  extract:
    kind: python
    path: my_extractors.py:Paragraphs
    options: {min_characters: 20}
"""

import html as entities
import re

from pydantic import Field

from llmsys.data_pipeline.extract.python_extractor import PythonExtractor

PARAGRAPH = re.compile(r"<p\b[^>]*>(.*?)</p>", re.DOTALL | re.IGNORECASE)
TAG = re.compile(r"<[^>]*>")


class Paragraphs(PythonExtractor):
    """Keep the paragraphs of a page that are long enough."""

    min_characters: int = Field(0, ge=0, description="Minimum characters of a paragraph.")

    def extract(self, html: str) -> str:
        """Return the text of a page."""
        found = [
            " ".join(entities.unescape(TAG.sub("", one)).split()) for one in PARAGRAPH.findall(html)
        ]
        return "\n\n".join(one for one in found if len(one) >= self.min_characters)


if __name__ == "__main__":
    assert (
        Paragraphs().extract("<h1>Title</h1><p>One <b>line</b> &amp; more</p>") == "One line & more"
    )
    print("the extractor returns the text it should")
