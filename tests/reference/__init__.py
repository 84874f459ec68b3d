"""Independent implementations that the tests compare with; no program imports them."""
