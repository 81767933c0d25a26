"""gguf files: their headers, and the config, weights and tokenizer that they mean"""
