"""The client: transformers models whose blocks run on hosts of a swarm.

Users import ``AutoSwarmModelForCausalLM`` from ``swarmnet``. This package does not export the
class: the package knows no swarm files, and importing the class loads torch.
"""
