"""One file per command: it parses its options, calls one part of pdtool and prints the result."""
