"""Programs that act with a model of a swarm: ``swarmnet agent``."""
