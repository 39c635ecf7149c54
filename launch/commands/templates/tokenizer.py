"""A tokenizer, to copy and change. Run this file to test it: python my_tokenizer.py

tokenizer:
  kind: python
  path: my_tokenizer.py:Bytes
  options: {lowercase: true}
model: {vocab_size: 257}
"""

from collections.abc import Sequence

from pydantic import Field

from llmsys.vocabulary.python_tokenizer import PythonTokenizer, check_python_tokenizer


class Bytes(PythonTokenizer):
    """Encode each byte of UTF-8 as one id."""

    lowercase: bool = Field(False, description="Lower all letters.")

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is smaller."""
        return 257

    @property
    def eos_id(self) -> int:
        """Id that ends every document; no text is encoded to it."""
        return 256

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list((text.lower() if self.lowercase else text).encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return bytes(one for one in ids if one < self.eos_id).decode("utf-8", "replace")


if __name__ == "__main__":
    check_python_tokenizer(Bytes(), ["plain", "naïve 漢字", ""])
    print("the tokenizer returns every text from its ids")
