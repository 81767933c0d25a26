"""The directory over hivemind's DHT: calls between admitted peers, bounded storage, replication."""
