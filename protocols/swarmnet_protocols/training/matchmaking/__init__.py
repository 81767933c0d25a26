"""The choice of the workers of a round: their positions, their groups, and their rosters."""
