"""Write what commands print now into docs/: `python -m tests.helpers.refresh_pages`, then read the
diff.

Where a page leaves out lines with …, the lines that are most like the shown ones take their place,
in order.
"""

import contextlib
import difflib
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmsys.launch.main import main
from tests.docs.test_commands import LATER, PAGES, is_exact, list_page_commands, write_config
from tests.helpers.markdown_blocks import ELISION, list_blocks, matches_output


def choose_lines(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Return the shown lines as they are printed now; lines without a successor are left out."""
    chosen, start = [], 0
    for line in shown:
        if line.strip() == ELISION:
            chosen.append(line)
            continue
        ratios = [difflib.SequenceMatcher(None, line, one).ratio() for one in printed[start:]]
        if ratios and max(ratios) > 0.5:
            start += ratios.index(max(ratios)) + 1
            chosen.append(printed[start - 1].rstrip())
    return chosen


def refresh_page(path: Path) -> None:
    for command in list_page_commands(path):
        program, *words = command.words
        if (
            program != "llmsys"
            or not (is_exact(words) or words[0] == "plan")
            or words[1:2] in ([one] for one in LATER)
            or not command.output
        ):
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main(words)
        if not matches_output(command.output, output.getvalue()):
            now = choose_lines(command.output, output.getvalue().splitlines())
            before = "\n".join([f"$ {command.text}", *command.output])
            path.write_text(
                path.read_text().replace(before, "\n".join([f"$ {command.text}", *now]))
            )
            print(f"{command.place}: {command.text}")


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    for page in PAGES:
        for block in list_blocks(page):
            if block.language == "yaml":
                write_config(block)
    for page in PAGES:
        refresh_page(page)
