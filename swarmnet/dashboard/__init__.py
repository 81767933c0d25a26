"""The dashboard: what a swarm does now and did of late, watched from one place in it, on a page and as JSON."""
