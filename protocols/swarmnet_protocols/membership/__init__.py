"""Who is in a swarm, as what, and how that is shown, ended and refused."""
