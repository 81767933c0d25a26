"""Swarms behind routers, in network namespaces."""
