"""What a placement costs: every formula once, with its source."""
