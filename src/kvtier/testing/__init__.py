"""Suites and models for the tests of kvtier and of third-party tiers."""
