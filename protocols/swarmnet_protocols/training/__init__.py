"""What the workers of a training job agree on: the job, the roster of a round, the average of their contributions, the shared state.

Two numbers must be told apart:

- The *round number* counts a job's outer steps, from 0. A round is inner steps on each worker's own data, then one exchange.
- The *exchange number* identifies one averaging among the members of one roster. A discarded round is tried again with another roster and a
  higher exchange number. Round r uses the numbers r * 65,536 + 1 to (r + 1) * 65,536 (``rosters.EXCHANGES_PER_ROUND``), so every message of
  an exchange belongs to exactly one roster, and a peer that claims a high number can use up the numbers of one round only.

A *position* is a worker's round number and the id (SHA-256) of the state from which this round starts.
"""

MAX_MEMBERS = 64
"""Most workers of a job that take part in one round, so ``max_workers`` at most. Every member opens a stream to every other one, and
the data of a job are divided among ``max_workers`` slots: more would leave most of them untouched in a pass."""
