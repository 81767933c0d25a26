"""The data that clients and hosts share for inference and training passes: steps, activation logs, links, adapters, passes."""
