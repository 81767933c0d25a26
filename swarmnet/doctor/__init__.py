"""`swarmnet doctor`: what is wrong with this machine, why it matters, and the command that fixes
it."""
