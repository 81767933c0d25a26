"""An OpenAI-compatible endpoint over a swarm."""
