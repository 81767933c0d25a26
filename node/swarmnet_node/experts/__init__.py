"""Routed experts on several peers: computing them for others, and having others compute them."""
