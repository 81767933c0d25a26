"""The agreement among the workers of a training job: the job, the roster of a round, the average of their contributions, the shared state.

Two numbers are easily confused:

- The *round number* counts a job's outer steps, from 0. A round is inner steps on each worker's own data, then one exchange.
- The *exchange number* identifies one averaging among one roster. A round that is discarded is tried again with another roster, under a higher
  exchange number. Round r uses the numbers r * 65,536 + 1 to (r + 1) * 65,536 (``rosters.EXCHANGES_PER_ROUND``), so every message of an
  exchange belongs to exactly one roster, and a peer that claims a high number can use up those of one round only.

A *position* is a worker's round number with the id of the state (SHA-256) that this round starts from.
"""
