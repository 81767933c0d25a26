"""The conversation that carries activations down a chain of hops.

``steps.py`` says what a step is and which steps a lane may take; ``log.py`` keeps what a hop sent so that it can be
sent again; ``link.py`` feeds a downstream hop from that log. ``passes.py`` has what passes, which keep nothing, need instead.
The client's side is ``swarmnet_client.chain.chain`` and ``passes``, the host's ``swarmnet_node.hosting.host``.
"""
