"""The code that all peers share: identity, transport, records, models, decisions and
conversations."""
