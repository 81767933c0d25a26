"""The program on a volunteer's machine: the engine, the caches, hosting, control."""
