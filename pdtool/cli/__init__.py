"""The command line: `commands` has the commands by what they are about, the other modules are what they share."""
