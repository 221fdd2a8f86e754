"""Executors carry out copy plans: one per kind of device."""
