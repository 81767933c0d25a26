"""An endpoint over a swarm for clients of OpenAI, Anthropic and Ollama."""
