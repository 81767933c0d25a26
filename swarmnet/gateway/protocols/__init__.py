"""Protocols: each reads the requests of one API and writes its answers."""
