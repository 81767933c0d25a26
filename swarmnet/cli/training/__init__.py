"""``swarmnet tune`` and ``swarmnet train``, with their progress and plots."""
