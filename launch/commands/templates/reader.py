"""A reader of a file format, to copy and change. Run this file to test it: python my_readers.py

data:
  inputs:
    - path: mail/*.mbox
      reader: {kind: python, path: "my_readers.py:Mailbox", options: {min_characters: 20}}
"""

import email
import re
from collections.abc import Iterator
from typing import BinaryIO

from pydantic import Field

from llmsys.data_pipeline.readers.python_reader import Document, PythonReader, check_python_reader

MESSAGE = re.compile(rb"^From .*\n", re.MULTILINE)


class Mailbox(PythonReader):
    """Read the plain messages of a mailbox."""

    min_characters: int = Field(1, ge=0, description="Minimum characters of a message.")

    def read(self, file: BinaryIO) -> Iterator[Document]:
        """Yield the documents of a file."""
        for part in MESSAGE.split(file.read())[1:]:
            message = email.message_from_bytes(part)
            body = message.get_payload(decode=True)
            text = body.decode("utf-8", "replace").strip() if isinstance(body, bytes) else ""
            if len(text) >= self.min_characters:
                yield Document(
                    text=text, id=message.get("Message-ID", ""), date=message.get("Date", "")
                )


if __name__ == "__main__":
    mailbox = b"From a@b\nSubject: One\n\nHello\n\nFrom c@d\nSubject: Two\n\nGood bye\n"
    check_python_reader(Mailbox(), mailbox, ["Hello", "Good bye"])
    print("the reader yields the documents it should")
