"""The model of a job: its config, its checks, its weights, and one stage of it."""
