"""A mapper of documents, to copy and change. Run this file to test it: python my_mappers.py

data:
  rules:
    - kind: mapper
      path: my_mappers.py:Titled
"""

from pydantic import Field

from llmsys.data_pipeline.rules.document_row import DocumentRow
from llmsys.data_pipeline.rules.python_document import PythonMapper, check_python_mapper


class Titled(PythonMapper):
    """Put the title of a document before its text."""

    field: str = Field("title", description="Field of the input with the title.")

    def map_text(self, document: DocumentRow) -> str:
        """Return the new text; it depends on the columns of the document and the options alone."""
        title = document.fields.get(self.field)
        return f"{title}\n\n{document.text}" if isinstance(title, str) else document.text


if __name__ == "__main__":
    check_python_mapper(Titled(), DocumentRow("A text.", fields={"title": "One"}), "One\n\nA text.")
    check_python_mapper(Titled(), DocumentRow("A text."), "A text.")
    print("the mapper changes texts as it should")
