"""Collects what the dashboard shows: the directory, and the reports of nodes."""
