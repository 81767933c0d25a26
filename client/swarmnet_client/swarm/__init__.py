"""What a client knows of a swarm: the hosts of a model, their delays and failures, and the event loop all of it runs on."""
