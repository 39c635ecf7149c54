"""An annotator of documents, to copy and change. Run this file to test it: python my_annotators.py

data:
  rules:
    - kind: annotator
      path: my_annotators.py:Origin
      options: {default: unknown}
"""

from typing import Any

from pydantic import Field

from llmsys.data_pipeline.rules.document_row import DocumentRow
from llmsys.data_pipeline.rules.python_document import PythonAnnotator, check_python_annotator


class Origin(PythonAnnotator):
    """Add the columns origin.source and origin.is_https."""

    default: str = Field("web", description="Source of a document whose input has no such field.")

    def list_columns(self) -> dict[str, type]:
        """Return the columns and their types: bool, int, float or str."""
        return {"source": str, "is_https": bool}

    def annotate(self, document: DocumentRow) -> dict[str, Any]:
        """Return the values of a document; they depend on its columns and the options alone."""
        return {
            "source": document.fields.get("source", self.default),
            "is_https": document.url.startswith("https:"),
        }


if __name__ == "__main__":
    document = DocumentRow("A text.", url="https://example.org/", fields={"source": "book"})
    check_python_annotator(Origin(), document, {"source": "book", "is_https": True})
    print("the annotator gives the values that it should")
