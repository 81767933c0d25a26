"""Reaching peers that cannot be dialled: behind home routers, carrier-grade NAT and office firewalls.

1. **Dial-back** (``dial_back.py``). At its start, and again when its network changes, a peer asks others to dial it. If they reach it, it is
   *open*: it announces those addresses, may store DHT records for others, and may relay. If not, it is a client of the DHT.
2. **Reservation** (``reservations.py``). A peer that cannot be dialled keeps a stream open to two relays, and announces circuit addresses:
   ``RELAY_ADDRESS/p2p/RELAY/p2p-circuit``.
3. **Circuit** (``relay.py``, ``circuit.py``). To open a stream to such a peer, another peer asks its relay, which joins two streams. The two ends
   authenticate each other and encrypt with Noise, so the relay is trusted with nothing but delivery.
4. **Direct path** (``hole_punching.py``). Over the circuit the two peers agree to dial each other at the same moment, through their routers.
   Streams opened afterwards go directly; until then, and where no direct path exists, over circuits.

``routed_transport.py`` chooses the path of every stream. libp2p's own AutoNAT, AutoRelay, relay and DCUtR are switched off in p2pd:
docs/decisions/0018-relays-over-project-streams.md says why.
"""
