"""Training in stages: microbatches that travel through workers of all stages."""
