"""What clients and hosts agree on for inference and training passes: steps, activation logs, links, adapters, passes."""
