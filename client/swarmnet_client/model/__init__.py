"""A transformers model with remote blocks: the client computes embeddings and lm_head, hosts
compute the blocks."""
