"""What two peers must agree on: identity, transport, records, models, decisions and conversations."""
