"""Check file names that are read from records, indexes or manifests.

An untrusted one may be `../x` or `/etc/x`.
"""


def is_plain_file_name(name: object) -> bool:
    """Return True for the name of a file in one folder: no separator, no parent, nothing absolute.

    Args:
        name: A value of any type, as read.

    Returns:
        False for control characters too.
    """
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not any(character in "/\\" or ord(character) < ord(" ") for character in name)
