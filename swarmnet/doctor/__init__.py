"""Is this machine fit for a swarm, and if not, what mends it? Facts are gathered first; what they mean is decided apart from that."""
