"""What a user of the swarm runs: routes, chains, the model facade."""
