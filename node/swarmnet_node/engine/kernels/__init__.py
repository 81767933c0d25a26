"""C code of our own, compiled where it runs, and what stands between it and torch."""
