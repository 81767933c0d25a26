"""A volunteer: one machine that hosts blocks or trains a job, whichever its swarm needs more."""
