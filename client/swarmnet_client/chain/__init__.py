"""A chain of hosts: opening hops, steps in flight, and replacing a host that failed."""
