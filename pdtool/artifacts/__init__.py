"""The files that the parts exchange: one class per kind, which alone decides how it is read, checked and written."""
