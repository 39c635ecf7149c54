"""Columns that follow from a column of documents: names in addresses, parts of dates."""

from collections.abc import Callable

from llmsys.data_pipeline.rules.url import parse_host_names

# The group of a document whose column has no value.
NO_VALUE = "(none)"

# By name: the stored column, and the value that follows from its text.
DERIVED: dict[str, tuple[str, Callable[[str], str]]] = {
    "host": ("url", lambda url: parse_host_names(url)[1]),
    "domain": ("url", lambda url: parse_host_names(url)[0]),
    "year": ("date", lambda date: date[:4]),
    "month": ("date", lambda date: date[:7]),
}
