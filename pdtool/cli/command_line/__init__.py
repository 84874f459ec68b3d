"""The command line itself: options in groups, -q and -v, and a project's defaults."""
