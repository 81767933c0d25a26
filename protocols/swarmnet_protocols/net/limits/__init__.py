"""Limits of streams: what peers may reserve and use, by peer and by subnet, and rates of bytes and
messages."""
