"""The data that clients and hosts share for inference and training passes.

It covers steps, activation logs, links, adapters and passes.
"""
