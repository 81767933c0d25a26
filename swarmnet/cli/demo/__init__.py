"""``swarmnet demo``: a swarm of processes on this machine, asked one question."""
