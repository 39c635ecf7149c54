"""Names of files that come out of a file: trusted only when they name something in the folder they belong to.

Imports nothing of ours. A record, an index or a manifest that somebody else wrote may say `../x` or `/etc/x`.
"""


def is_plain_file_name(name: object) -> bool:
    """Return whether a value is the name of a file in one folder: no separator, no parent, nothing absolute."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return not any(character in "/\\" or ord(character) < ord(" ") for character in name)
