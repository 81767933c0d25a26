"""Which workers take part in a round: positions of workers, groups, and their rosters."""
