"""``swarmnet swarm``: a swarm's file, its members, and what it does now."""
