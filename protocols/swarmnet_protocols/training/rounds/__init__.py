"""One averaging round: members of a roster average a vector slice by slice and commit the result or discard it."""
