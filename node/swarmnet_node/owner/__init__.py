"""What the computer's owner decides: limits, schedule, pauses, and the control socket."""
