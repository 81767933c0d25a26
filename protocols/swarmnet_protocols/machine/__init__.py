"""What belongs to this machine and not to the network: files, clocks, devices, threads, compiled code."""
