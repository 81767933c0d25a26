"""Fetching parts of a model's files: by pieces that are verified one by one, from the hub and from
peers."""
