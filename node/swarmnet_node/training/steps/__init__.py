"""The inner steps of a worker: its trainer, its weights and gradients, and its optimizer."""
