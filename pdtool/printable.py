"""Show control characters instead of obeying them: names come from strangers, and texts from users' exceptions."""

from __future__ import annotations

import re

# Control characters (C0 but tab and line feed, DEL, C1), line separators, marks that reverse the direction of writing,
# halves of characters, and what is no character and so not allowed in XML.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def printable(text: str) -> str:
    """Return the text with control characters written as `\\x1b` and `\\u202e`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
