"""The options of the commands, each declared once, as a field of a dataclass."""
