"""Blocks in a file system: two layouts, `files` and `segments`, behind one tier."""
