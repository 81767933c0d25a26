"""Commands about the endpoint: serving models of a swarm, batches, routers and agents."""
