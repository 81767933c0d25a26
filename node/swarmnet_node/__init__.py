"""What a volunteer's machine runs: the engine, the caches, hosting, control."""
