"""Tiers: places that keep blocks outside the primary tier. `registry` finds them by name."""
