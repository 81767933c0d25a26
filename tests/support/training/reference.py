"""The published update rules in float64, as their papers write them, for a whole swarm at once.

Shapes: W workers, N parameters. ``inner(worker, step, x)`` is one inner step of one worker. Every
function returns the parameters of the workers at the end of each round, after any outer step: a
list of [W, N].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Inner = Callable[[int, int, Vector], Vector]

WORD = 1 << 32


@dataclass(frozen=True)
class Run:
    """The input of every rule: the common start [N], the inner step, and the number of steps."""

    start: Vector
    inner: Inner
    workers: int
    rounds: int

    def replicas(self) -> Vector:
        return np.stack([self.start] * self.workers)

    def train(self, x: Vector, first_step: int, count: int) -> Vector:
        """Each worker's row of ``x`` after ``count`` inner steps."""
        rows = []
        for worker, first in enumerate(x):
            row = first
            for step in range(first_step, first_step + count):
                row = self.inner(worker, step, row)
            rows.append(row)
        return np.stack(rows)


def sgd(run: Run, gradient: Inner, lr: float) -> list[Vector]:
    """θ <- θ - lr mean_i g_i(θ)."""
    theta, trace = run.start, []
    for t in range(run.rounds):
        theta = theta - lr * np.mean([gradient(i, t, theta) for i in range(run.workers)], axis=0)
        trace.append(np.stack([theta] * run.workers))
    return trace


def diloco(run: Run, steps: int, eta: float, mu: float) -> list[Vector]:
    """v <- μ v + Δ̄; θ <- θ - η (Δ̄ + μ v), Δ_i = θ - θ_i."""
    theta, v, trace = run.start, np.zeros_like(run.start), []
    for t in range(run.rounds):
        delta = theta - run.train(np.stack([theta] * run.workers), t * steps, steps).mean(axis=0)
        v = mu * v + delta
        theta = theta - eta * (delta + mu * v)
        trace.append(np.stack([theta] * run.workers))
    return trace


def streaming(
    run: Run, steps: int, fragments: int, tau: int, mixing: float, outer: tuple[float, float]
) -> list[Vector]:
    """At inner step H/P (r + 1), Δ of fragment r mod P is taken, H steps and P fragments; at τ
    steps later the outer step and the mixing are done."""
    eta, mu = outer
    theta, v = run.start.copy(), np.zeros_like(run.start)
    cuts = [len(theta) * p // fragments for p in range(fragments + 1)]
    local, trace = run.replicas(), []
    taken: Vector | None = None
    for r in range(run.rounds):
        first = r * steps // fragments
        local = run.train(local, first, tau)
        if taken is not None:
            f = slice(cuts[(r - 1) % fragments], cuts[(r - 1) % fragments + 1])
            v[f] = mu * v[f] + taken
            theta[f] -= eta * (taken + mu * v[f])
            local[:, f] = (1 - mixing) * theta[f] + mixing * local[:, f]
        local = run.train(local, first + tau, steps // fragments - tau)
        f = slice(cuts[r % fragments], cuts[r % fragments + 1])
        taken = (theta[f] - local[:, f]).mean(axis=0)
        trace.append(local.copy())
    return trace


def eager(run: Run, steps: int, eta: float, mu: float) -> list[Vector]:
    """Δ̃_i(t) = Δ_i(t)/M + Δ̄(t-1) - Δ_i(t-1)/M; θ_i <- Outer(θ_i, Δ̃_i).

    The first round has no average and no outer step: workers go on, and no own part of it was ever
    applied.
    """
    theta, v = run.replicas(), np.zeros((run.workers, len(run.start)))
    start, before, applied, trace = theta, None, np.zeros_like(theta), []
    for t in range(run.rounds):
        end = run.train(start, t * steps, steps)
        delta = start - end
        if before is None:
            start = end
        else:
            fresh = delta / run.workers
            mixed = fresh + before.mean(axis=0) - applied
            v = mu * v + mixed
            theta = theta - eta * (mixed + mu * v)
            applied, start = fresh, theta
        before = delta
        trace.append(start)
    return trace


def noloco(
    run: Run,
    steps: int,
    alpha: float,
    beta: float,
    gamma: float,
    *,
    groups: Sequence[Sequence[Sequence[int]]],
) -> list[Vector]:
    """δ_i <- α δ_i + (β/n) Σ_k (θ_k - φ_k) - γ (φ_i - mean_k φ_k); φ_i <- φ_i + δ_i; ``groups``:
    who with whom, by round."""
    phi, delta, trace = run.replicas(), np.zeros((run.workers, len(run.start))), []
    for t in range(run.rounds):
        theta = run.train(phi, t * steps, steps)
        slow = phi.copy()
        for group in groups[t]:
            progress = sum(theta[k] - slow[k] for k in group) / len(group)
            mean = sum(slow[k] for k in group) / len(group)
            for i in group:
                delta[i] = alpha * delta[i] + beta * progress - gamma * (slow[i] - mean)
                phi[i] = slow[i] + delta[i]
        trace.append(phi.copy())
    return trace


def sparseloco(
    run: Run, steps: int, decay: float, lr: float, *, quantise: Callable[[Vector], Vector]
) -> list[Vector]:
    """e_i <- decay e_i + Δ_i; q_i = quantise(e_i); e_i <- e_i - q_i; θ <- θ - lr mean q."""
    theta, e, trace = run.start, np.zeros((run.workers, len(run.start))), []
    for t in range(run.rounds):
        e = decay * e + theta - run.train(np.stack([theta] * run.workers), t * steps, steps)
        q = np.stack([quantise(row) for row in e])
        e = e - q
        theta = theta - lr * q.mean(axis=0)
        trace.append(np.stack([theta] * run.workers))
    return trace


def co2(run: Run, steps: int, lr: float, mu: float, clip: float) -> list[Vector]:
    """m <- clip(μ m + (x - x̄_stale)/Λ, ±φ); x <- x - α m, one round late: Λ = 1. No outer step
    after the first round."""
    x, m = run.start, np.zeros_like(run.start)
    local, stale, trace = run.replicas(), None, []
    for t in range(run.rounds):
        local = run.train(local, t * steps, steps)
        mean = local.mean(axis=0)
        if stale is not None:
            m = np.clip(mu * m + (x - stale), -clip, clip)
            x = x - lr * m
            local = np.stack([x] * run.workers)
        stale = mean
        trace.append(local)
    return trace


def zeroth_order(
    run: Run, loss: Callable[[int, Vector], float], seed: int, h: int, eps: float, lr: float
) -> list[Vector]:
    """g_ij = [L_i(θ + ε z_ij) - L_i(θ - ε z_ij)] / 2ε; after h steps θ <- θ - lr Σ_ij g_ij z_ij."""
    theta, trace = run.start, []
    for t in range(run.rounds):
        moves = np.zeros_like(theta)
        for i in range(run.workers):
            for j in range(h):
                z = direction(seed, t, 64 * j + i, len(theta))
                moves += (loss(i, theta + eps * z) - loss(i, theta - eps * z)) / (2 * eps) * z
        theta = theta - lr * moves
        trace.append(np.stack([theta] * run.workers))
    return trace


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, Salmon et al. 2011, on Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def direction(seed: int, round: int, index: int, count: int) -> Vector:
    """The first ``count`` elements of a direction: the bits of the generator's words, the lowest
    first, 0 for 1 and 1 for -1."""
    bits: list[int] = []
    for block in range(-(-count // 128)):
        words = philox((block % WORD, block // WORD, round, index), (seed % WORD, seed // WORD))
        bits += [word >> bit & 1 for word in words for bit in range(32)]
    return 1.0 - 2.0 * np.array(bits[:count], dtype=np.float64)


def noloco_variance(alpha: float, gamma: float, replicas: int) -> NDArray[np.float64]:
    """[3, 3]: one round on (E d², E d δ, E δ²), d the deviation of a replica, without inner steps,
    in pairs drawn anew.

    δ' = α δ - γ P d and d' = d + δ', with P a projection, independent of both, and E P = q on
    deviations.
    """
    q = 0.5 * (1 + 1 / (replicas - 1))
    momentum = np.array([gamma**2 * q, -2 * alpha * gamma * q, alpha**2])
    mixed = np.array([-gamma * q, alpha, 0.0])
    return np.stack([np.array([1.0, 0, 0]) + 2 * mixed + momentum, mixed + momentum, momentum])
