"""The command line: `app` is the group, `commands` has a file per command, `console` prints and draws."""
