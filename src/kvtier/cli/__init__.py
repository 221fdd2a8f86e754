"""The command line: `kvtier`."""
