"""The options of the commands, each declared once, as a field of a dataclass.

Nobody prints these dataclasses, and only ProfileOptions, which a profile records, is compared: what they have no need
of would be compiled anew each time that the program starts.
"""
