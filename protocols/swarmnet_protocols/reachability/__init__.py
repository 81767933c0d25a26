"""Reaches peers that cannot be dialled: behind home routers, carrier-grade NAT and firewalls.

1. **Dial-back** (``dial_back.py``). At its start, and whenever its network changes, a peer asks
   others to dial it. If they reach it, the peer is *open*: it announces its addresses, may store
   DHT records for others, and may relay. Otherwise it is a client of the DHT.
2. **Reservation** (``reservations.py``). A peer that cannot be dialled keeps a stream open to two
   relays. It announces circuit addresses: ``RELAY_ADDRESS/p2p/RELAY/p2p-circuit``.
3. **Circuit** (``relay.py``, ``circuit.py``). To open a stream to such a peer, another peer asks
   its relay. The relay joins two streams. The two ends authenticate each other and encrypt with
   Noise, so the relay is trusted with nothing but delivery.
4. **Direct path** (``hole_punching.py``). Over the circuit the two peers agree to dial each other
   at the same moment, through their routers. If that succeeds, later streams go directly. Otherwise
   they use circuits.

``routed_transport.py`` chooses the path of every stream. p2pd runs without libp2p's own AutoNAT,
AutoRelay, relay and DCUtR: docs/decisions/0018-relays-over-project-streams.md says why.
"""
