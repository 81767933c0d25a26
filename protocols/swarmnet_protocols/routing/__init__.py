"""Which hosts serve which blocks: the cost of a chain, measured speeds, and where a new host is placed."""
