"""Jobs whose model no worker holds: each worker has one stage of it."""
