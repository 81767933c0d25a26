"""The files of a model: safetensors and gguf, read through one interface, and what their tensors
are."""
