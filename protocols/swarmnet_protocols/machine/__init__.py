"""This machine rather than the network: files, clocks, devices, threads, compiled code."""
