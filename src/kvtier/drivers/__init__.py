"""Drivers run the commands of the core against tiers."""
