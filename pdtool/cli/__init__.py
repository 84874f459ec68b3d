"""The command line: `commands` has the commands by topic; they share the other modules."""
