"""The options of the commands, each declared once, as a field of a dataclass.

Nobody prints or compares these dataclasses, so that they have neither `repr` nor `eq`: those would be compiled anew
each time that the program starts.
"""
