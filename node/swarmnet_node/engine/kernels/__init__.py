"""Backends: the arithmetic of decoder layers, by torch and by C code that is compiled on the machine where it runs."""
