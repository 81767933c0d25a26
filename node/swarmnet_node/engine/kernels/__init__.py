"""Backends: the arithmetic of decoder layers, in torch and in C that this machine compiles."""
