"""The client: transformers models whose blocks run on hosts of a swarm.

Users import ``AutoSwarmModelForCausalLM`` from ``swarmnet``. It is not repeated here, because this package knows no swarm files, and because
importing it loads torch.
"""
