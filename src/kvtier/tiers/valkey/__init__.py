"""Blocks in Valkey or Redis: one server, or a cluster."""
