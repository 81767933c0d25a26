"""The dashboard: observes a swarm, stores a history of 30 days, and serves both as a page and as
JSON."""
