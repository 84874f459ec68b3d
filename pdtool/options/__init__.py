"""The options of the commands, each declared once, as a field of a dataclass.

These dataclasses need no repr, and only ProfileOptions, which a profile records, needs comparison. Other methods would
be compiled each time that the program starts.
"""
