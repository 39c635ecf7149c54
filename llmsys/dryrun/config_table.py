"""Format the dry runs of all training configs as a table, and put it into a page.

Reads results of `run_dry_run`, and a Markdown file with the two marks.
"""

from pathlib import Path
from typing import Any

from llmsys.errors import ConfigError
from llmsys.estimate.memory_timeline import GIB

BEGIN, END = "<!-- dry runs: begin -->", "<!-- dry runs: end -->"


def format_config_table(found: dict[str, list[dict[str, Any]]], refuted: dict[str, str]) -> str:
    """Return a table of the dry runs of several configs, one row for each.

    Args:
        found: Results of the ranks that ran, by config.
        refuted: Why a config is not proven, by config.

    Returns:
        A table in Markdown: ranks of the cluster, those that ran, compared calls of the first of
        them, the largest needed memory, the verdict, and what has no expectation.
    """
    names = ("config", "ranks", "run", "calls", "GiB", "verdict", "not checked")
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, results in found.items():
        cells = [name, "", "0", "", "", refuted.get(name, "proven").partition("\n")[0], ""]
        if results:
            checks = [one[key] for one in results for key in ("collective_check", "block_check")]
            unchecked = dict.fromkeys(text for check in checks for text in check["unchecked"])
            cells[1:5] = [
                str(results[0]["world_size"]),
                ", ".join(str(one["rank"]) for one in results),
                f"{results[0]['collective_check']['num_messages']:,}",
                f"{max(one['needed_bytes'] for one in results) / GIB:.1f}",
            ]
            cells[6] = "; ".join(unchecked)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replace_table(path: Path, table: str) -> str:
    """Return the text of a page with another table between its marks.

    Args:
        path: Markdown file.
        table: From `format_config_table`.

    Returns:
        The whole text.

    Raises:
        ConfigError: the file is missing, or does not have each mark once, in this order.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ConfigError(
            f"--table {path} has no place for the table. Give a Markdown file with the lines "
            f"{BEGIN} and {END}, once each."
        )
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
