"""Joining a swarm: the network connection, and admission to a private swarm."""
