"""Is this machine fit for a swarm, and if not, how to fix it? Facts are gathered first; what they mean is decided apart from that."""
