"""What the observer of a swarm learns from the directory, and from the reports of its peers."""
