"""Real agents on a demo swarm, each with one turn that calls a tool: ``python -m tests.agents``."""
