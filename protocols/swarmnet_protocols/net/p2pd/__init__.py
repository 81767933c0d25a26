"""The transport over libp2p: one p2pd process, its streams, and the limits that it lacks."""
