"""The command ``router``."""
