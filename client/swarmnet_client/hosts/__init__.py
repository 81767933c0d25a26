"""The hosts of a model as a client knows them, the choice among them, and the client's event
loop."""
