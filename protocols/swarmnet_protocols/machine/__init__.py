"""Parts of this machine, not of the network: files, clocks, devices, threads, compiled code."""
