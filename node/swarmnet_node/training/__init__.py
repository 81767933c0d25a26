"""A training worker on its own machine: data, inner steps, checkpoints."""
