"""One averaging round: members of a roster average a vector and commit or discard the result."""
