"""``swarmnet batch``."""
