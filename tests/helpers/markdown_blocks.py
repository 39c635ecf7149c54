"""Code blocks and commands of Markdown pages: what a reader copies, with its place in the file."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELISION = "…"


class Block(NamedTuple):
    """One fenced block; `line` is that of its fence, counted from 1."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.path.name}:{self.line}"


class Command(NamedTuple):
    """One command of a console block, and the lines that the page shows below it."""

    place: str
    text: str
    output: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def list_blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(path, text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in FENCE.finditer(text)
    ]


def iter_commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a console block: lines after `$ `, continued by a backslash, and
    then their output.
    """
    number, lines = block.line, iter(block.text.splitlines())
    command, place = "", ""
    output: list[str] = []
    for line in lines:
        number += 1
        if line.startswith("$ "):
            if command:
                yield Command(place, command, tuple(output))
            command, output, place = line[2:], [], f"{block.path.name}:{number}"
            while command.endswith("\\"):
                number += 1
                command = command[:-1] + next(lines).strip()
        else:
            assert command, f"{block.place}: a console block begins with a command"
            output.append(line)
    if command:
        yield Command(place, command, tuple(output))


def list_inline_code(path: Path) -> list[str]:
    """Return the code in running text and tables, outside of blocks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", path.read_text()))


def matches_output(shown: tuple[str, ...], printed: str) -> bool:
    """Return whether a page shows what was printed, where a line of … stands for any lines."""
    pattern = "\n".join(
        r".*" if line.strip() == ELISION else re.escape(line.rstrip()) for line in shown
    )
    pattern = pattern.replace("\n.*", r"(\n.*)?").replace(".*\n", r"(.*\n)?")
    text = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text, flags=re.DOTALL) is not None
