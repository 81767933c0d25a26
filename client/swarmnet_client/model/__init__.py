"""The model as its user sees it: embeddings and lm_head computed here, blocks computed by hosts."""
