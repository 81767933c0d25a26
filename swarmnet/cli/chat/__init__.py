"""The interactive chat of `swarmnet run`."""
