"""The pure core: decides what moves. See `kvtier.core.manager`."""
