"""The transport over py-libp2p, for machines without a p2pd binary: TCP, noise and yamux, on a
thread of its own."""
