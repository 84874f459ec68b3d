"""Plans, and other artifacts, as commands show and compare them."""
