"""What the benches that stand beside datatrove ask for: crawl files, its interpreter, and how many documents."""

import argparse


def build_datatrove_parser(description: str | None, limit: int) -> argparse.ArgumentParser:
    """A parser that knows these; `limit` is the default number of documents."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crawl", nargs="+", help="WARC files or patterns")
    parser.add_argument("--datatrove", metavar="PYTHON", help="an interpreter that has datatrove")
    parser.add_argument("--limit", type=int, default=limit, help="documents; 0 takes all (default: %(default)s)")
    return parser
