"""Observes a swarm: reads its directory, and the reports of its peers."""
