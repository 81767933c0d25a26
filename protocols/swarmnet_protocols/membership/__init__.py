"""Membership: the peers of a swarm, their roles, and how both are proved, ended and refused."""
