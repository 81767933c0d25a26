"""Audits find hosts with wrong outputs: a small random share of outputs is computed again by other
hosts. Pure decisions."""
