"""Routed experts on several peers: a host computes experts for others, and peers compute its
missing ones."""
