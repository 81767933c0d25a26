"""The decisions of the computer's owner: limits, schedule, pauses, and the control socket."""
