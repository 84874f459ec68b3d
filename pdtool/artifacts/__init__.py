"""The files that pass between the parts: one class per kind, the only source of truth for reading and writing."""
