"""One averaging round: its messages, its state machine, its transfers, and the task that runs it."""
