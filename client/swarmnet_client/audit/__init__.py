"""Wrong outputs of hosts are found: a small random share of blocks is computed again by others."""
