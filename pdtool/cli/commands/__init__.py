"""The commands: each reads its options, calls the API and prints the result; `app` is the group of all."""
