"""Fine-tuning from a file of rows: a plain PyTorch loop with PEFT over any causal language model,
such as one in the swarm."""
