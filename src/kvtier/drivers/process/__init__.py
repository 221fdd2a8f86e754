"""Tiers in processes of their own: see `driver`."""
