"""What workers that train together must agree on: codecs, rounds, averaging and the update rules."""
