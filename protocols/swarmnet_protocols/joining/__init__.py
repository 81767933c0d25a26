"""Joining a swarm: the network connection, admission to a private swarm, and probes of
reachability."""
