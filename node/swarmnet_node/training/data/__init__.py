"""The training data of a worker: documents, their tokens, and the sequences of each slot."""
