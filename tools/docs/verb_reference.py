"""Reference page of every verb, from the parsers of `llmsys`."""

import argparse
from functools import partial

from llmsys.launch.commands.verbs import VERBS
from llmsys.launch.main import build_parser, format_help
from tools.docs.markdown import format_anchor, format_docstring

WIDTH = 100  # columns of the help on the page; argparse takes those of the terminal


def format_verb(name: str) -> str:
    """Return the section of one verb: its summary and its help as `llmsys VERB --help` prints
    it.
    """
    parser = build_parser(name)
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=WIDTH)
    summary = format_docstring(f"{VERBS[name].summary[0].upper()}{VERBS[name].summary[1:]}.")
    return (
        f"## llmsys {name} "
        f"{{#{format_anchor(name)}}}\n\n{summary}\n\n```text\n{parser.format_help()}```"
    )


def format_page() -> str:
    """Return the page."""
    intro = (
        "# Verbs\n\nOne grammar everywhere: `llmsys VERB CONFIG [section.key=value …]`. "
        "Overrides take precedence over the file; options may stand anywhere. `--json` prints "
        'the result as JSON, and an error as one object `{"error": {"kind", "message", '
        '"status"}}`.\n\nExit status: 0, or 2 after an error that you can fix, with one '
        "message; 130 after Ctrl-C. [When something fails](../troubleshooting.md) lists those of "
        f"training.\n\n```text\n{format_help()}```"
    )
    return "\n\n".join([intro, *(format_verb(name) for name in VERBS)]) + "\n"
