"""Routing and placement: the search for a chain, speed estimates of hosts, and the choice of blocks
by hosts."""
