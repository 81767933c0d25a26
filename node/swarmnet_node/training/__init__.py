"""What a training worker does on its own machine: data, inner steps, checkpoints."""
