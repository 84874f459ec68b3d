"""Break runs in every way we know, and see what happens: `make chaos`."""
