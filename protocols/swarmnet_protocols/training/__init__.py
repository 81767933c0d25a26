"""The agreements of a training job's workers: job, rosters, averages of contributions, shared
state.

Two numbers must be told apart:

- The *round number* counts a job's outer steps, from 0. In a round each worker takes inner steps on
  its own data. Then the workers exchange once.
- The *exchange number* identifies one averaging among the members of one roster. A discarded round
  is tried again with another roster and a higher exchange number.

Round r uses the exchange numbers r * 65,536 + 1 to (r + 1) * 65,536
(``matchmaking.rosters.EXCHANGES_PER_ROUND``). So every message of an exchange belongs to exactly
one roster. A peer that claims a high number can use up the numbers of one round only.

A *position* is a worker's round number and the id (SHA-256) of the state at the start of this
round.
"""

MAX_MEMBERS = 64
"""Most members of a group. Every member opens a stream to every other one. A round of more workers
has several groups.
"""
MAX_WORKERS = 1024
"""Most workers of a job. The data of a job are divided among ``max_workers`` slots. With more, a
roster does not fit one message.
"""
