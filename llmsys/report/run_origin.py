"""Build the part of a run's report about its origin: starts, checkpoints, environment and config.

Reads a `RunRecord`.
"""

import json
from datetime import UTC, datetime
from typing import Any

from llmsys.report.html_markup import (
    Html,
    build_definition_list,
    build_details,
    build_table,
    build_tag,
    format_user_text,
)
from llmsys.report.run_record import RunRecord, is_finite


def build_run_origin(record: RunRecord) -> list[Html]:
    """Return configuration, environment and starts of the run, for the section on origins."""
    blocks = []
    if record.starts:
        rows = [
            (
                _format_time(s),
                str(s.get("engine", "–")),
                str(s.get("world_size", "–")),
                str(s.get("device", "–")),
                "the beginning" if s.get("resumed_from") is None else f"step {s['resumed_from']}",
            )
            for s in record.starts[-50:]
        ]
        head = ("started (UTC)", "engine", "processes", "device", "from")
        blocks += [build_tag("h3", "Starts"), build_table(head, rows, numeric=[2])]
    if record.checkpoints:
        last = record.checkpoints[max(record.checkpoints)]
        blocks.append(build_tag("p", f"{len(record.checkpoints)} checkpoints; the last: {last.get('folder', '?')} "))
    if record.environment:
        blocks.append(
            build_details("Environment of the run", build_definition_list(_flatten_mapping(record.environment)))
        )
    if record.config_text:
        blocks.append(build_details("Resolved configuration", format_user_text(record.config_text, 200_000)))
    return blocks


def _flatten_mapping(value: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return a nested mapping as (a.b.c, text) pairs."""
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{before}{key}"
        if isinstance(item, dict):
            pairs += _flatten_mapping(item, f"{name}.")
        else:
            pairs.append((name, item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)))
    return pairs


def _format_time(event: dict[str, Any]) -> str:
    seconds = event.get("time")
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}" if is_finite(seconds) else "–"
