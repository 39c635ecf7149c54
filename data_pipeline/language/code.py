"""One code per language, whatever its identifier calls it.

The codes are ISO 639-1 where it has one and ISO 639-3 otherwise; nb and nn are told apart, and `no`, which both
identifiers use for Bokmål beside nn, becomes nb. Traditional and simplified Chinese are both zh.
"""

CODE_OF = {
    "no": "nb",
    "iw": "he",
    "in": "id",
    "jw": "jv",
    "mo": "ro",
    "sh": "sr",
    "zh-Hant": "zh",
}


def standard(code: str) -> str:
    """The code that the pipeline uses for an identifier's label."""
    return CODE_OF.get(code, code)
