"""Local updates in numpy, each algorithm written from its paper's formulas, one worker at a time.

Nothing of jaxoverlap is used. The inner optimizer is gradient descent on a linear regression, whose
gradient is written by hand. Parameters are one flat vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

FEATURES, OUT = 8, 4
SIZE = FEATURES * OUT + OUT

Data = Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]  # [step][worker] -> x, y


def gradient(p: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the gradient of mean((x w + b - y)^2)."""
    w, b = p[: FEATURES * OUT].reshape(FEATURES, OUT), p[FEATURES * OUT :]
    error = 2 * (x @ w + b - y) / y.size
    return np.concatenate([(x.T @ error).ravel(), error.sum(0)])


def steps(p: np.ndarray, data: Data, worker: int, begin: int, end: int, rate: float) -> np.ndarray:
    for step in range(begin, end):
        p = p - rate * gradient(p, *data[step][worker])
    return p


def synchronous(p: np.ndarray, data: Data, workers: int, rate: float) -> np.ndarray:
    for step in data:
        p = p - rate * np.mean([gradient(p, *step[i]) for i in range(workers)], axis=0)
    return p


def averaged(p: np.ndarray, data: Data, workers: int, every: int, rate: float) -> np.ndarray:
    """Local SGD (1805.09767)."""
    for t in range(len(data) // every):
        p = np.mean(
            [steps(p, data, i, t * every, (t + 1) * every, rate) for i in range(workers)], axis=0
        )
    return p


def slowmo(p, data, workers, every, rate, beta, alpha):
    """SlowMo (1910.00643), algorithm 1: u = beta u + (x - avg) / rate; x = x - alpha rate u."""
    u = np.zeros_like(p)
    for t in range(len(data) // every):
        end = np.mean(
            [steps(p, data, i, t * every, (t + 1) * every, rate) for i in range(workers)], axis=0
        )
        u = beta * u + (p - end) / rate
        p = p - alpha * rate * u
    return p


def bmuf(p, data, workers, every, rate, eta, zeta, nesterov):
    """Blockwise model-update filtering: classical, or Nesterov block momentum."""
    w, start, block = p, p, np.zeros_like(p)
    for t in range(len(data) // every):
        end = np.mean(
            [steps(start, data, i, t * every, (t + 1) * every, rate) for i in range(workers)],
            axis=0,
        )
        block = eta * block + zeta * (end - start)
        w = w + block
        start = w + eta * block if nesterov else w
    return start


def nesterov(x, m, g, rate, mu):
    """torch.optim.SGD with nesterov=True: the outer optimizer of DiLoCo."""
    m = mu * m + g
    return x - rate * (g + mu * m), m


def diloco(p, data, workers, every, rate, outer_rate, mu, delay):
    """DiLoCo (2311.08105), or its naive delayed form (2502.12996); flushed at the end."""
    m, late = np.zeros_like(p), None
    for t in range(len(data) // every):
        g = np.mean(
            [p - steps(p, data, i, t * every, (t + 1) * every, rate) for i in range(workers)],
            axis=0,
        )
        late, g = (g, late) if delay else (late, g)
        if g is not None:
            p, m = nesterov(p, m, g, outer_rate, mu)
    if late is not None:
        p, m = nesterov(p, m, late, outer_rate, mu)
    return p


def eager_diloco(p, data, workers, every, rate, outer_rate, mu):
    """Eager updates (2502.12996): own outer gradient fresh, the others' of the last round."""
    xs, ms = [p] * workers, [np.zeros_like(p)] * workers
    before = [np.zeros_like(p)] * workers
    for t in range(len(data) // every):
        now = [
            xs[i] - steps(xs[i], data, i, t * every, (t + 1) * every, rate) for i in range(workers)
        ]
        for i in range(workers):
            others = sum(before[j] for j in range(workers) if j != i)
            xs[i], ms[i] = nesterov(xs[i], ms[i], (now[i] + others) / workers, outer_rate, mu)
        before = now
    return xs


def overlap_local_sgd(p, data, workers, every, rate, pullback, beta):
    """Overlap Local-SGD (2002.09539): pull to the anchor; average the pulled for the next one."""
    xs, z, v, average = [p] * workers, p, np.zeros_like(p), None
    for t in range(len(data) // every):
        xs = [steps(xs[i], data, i, t * every, (t + 1) * every, rate) for i in range(workers)]
        if average is not None:  # it was on its way during these steps
            v = beta * v + (average - z)
            z = z + v
        xs = [(1 - pullback) * x + pullback * z for x in xs]
        average = np.mean(xs, axis=0)
    return xs, z


def streaming_diloco(p, data, workers, every, rate, parts, delay, alpha, outer_rate, mu):
    """Streaming DiLoCo (2501.18512) as torchft's fragments: sent `delay` steps before its part ends.

    `parts` are the slices of the parameters' fragments.
    """
    xs, x, m = [p] * workers, p.copy(), np.zeros_like(p)
    part = every // len(parts)
    for t in range(len(data) // part):
        where = parts[t % len(parts)]
        launch = (t + 1) * part - delay
        xs = [steps(xs[i], data, i, t * part, launch, rate) for i in range(workers)]
        g = np.mean([x[where] - xs[i][where] for i in range(workers)], axis=0)
        xs = [steps(xs[i], data, i, launch, (t + 1) * part, rate) for i in range(workers)]
        x[where], m[where] = nesterov(x[where], m[where], g, outer_rate, mu)
        for i in range(workers):
            xs[i] = xs[i].copy()
            xs[i][where] = alpha * xs[i][where] + (1 - alpha) * x[where]
    return xs, x


def co2(
    p: np.ndarray,
    data: Data,
    workers: int,
    every: int,
    rate: float,
    beta: float,
    alpha: float,
    penalty: Callable[[float, float], float],
    clip: float,
) -> np.ndarray:
    """CO2 (2401.16265), reconstructed; flushed at the end."""
    x, before, m, average = p, p, np.zeros_like(p), None

    def outer(x, before, m, average):
        g = before - average
        by = max(1.0, penalty(np.linalg.norm(x - before), np.linalg.norm(g)))
        m = np.clip(beta * m + g / by, -clip, clip)
        return x - alpha * m, x, m

    for t in range(len(data) // every):
        ends = [steps(x, data, i, t * every, (t + 1) * every, rate) for i in range(workers)]
        new = x
        if average is not None:
            new, before, m = outer(x, before, m, average)
        else:
            before = x
        average, x = np.mean(ends, axis=0), new
    return outer(x, before, m, average)[0]


LEAVES = (slice(FEATURES * OUT, None), slice(0, FEATURES * OUT))  # b, w: in JAX's order


class Co2Outer:
    """One worker's outer optimizer of CO2 with its options, on the flat vector."""

    def __init__(self, options: dict):
        self.o, zero = options, np.zeros(SIZE)
        self.m, self.moved, self.gradient = zero, zero, zero
        self.moves = [zero] * (options["delay"] + 1)
        self.products, self.squares = np.zeros(2), np.zeros(2)

    def sizes(self, x: np.ndarray) -> np.ndarray:
        """Return for each element the size that its penalty is of."""
        if self.o["over"] == "all":
            return np.full(SIZE, np.linalg.norm(x))
        if self.o["over"] == "element":
            return np.abs(x)
        found = np.zeros(SIZE)
        for leaf in LEAVES:
            found[leaf] = np.linalg.norm(x[leaf])
        return found

    def update(self, g: np.ndarray) -> np.ndarray:
        rates = self.rates(g) if self.o["alpha"] == "leaf" else self.o["alpha"]
        by = np.maximum(self.o["penalty"](self.sizes(self.moved), self.sizes(g)), 1)
        self.m = np.clip(self.o["beta"] * self.m + g / by, -self.o["clip"], self.o["clip"])
        self.moved = -rates * self.m
        self.moves = [*self.moves[1:], self.moved]
        self.gradient = g
        return self.moved

    def rates(self, g: np.ndarray) -> np.ndarray:
        """Return 1 / (4 c) of each leaf (1 / c without a delay), between 1/4 and 1."""
        rates, change = np.ones(SIZE), g - self.gradient
        for i, leaf in enumerate(LEAVES):
            u = self.moves[0][leaf]
            self.products[i] = 0.9 * self.products[i] + change[leaf] @ u
            self.squares[i] = 0.9 * self.squares[i] + u @ u
            c = self.products[i] / self.squares[i] if self.squares[i] else 0.0
            best = 0.25 if self.o["delay"] else 1.0
            rates[leaf] = np.clip(best / c, 0.25, 1) if c > 0 else 1.0
        return rates


def co2_with(p: np.ndarray, data: Data, workers: int, every: int, rate: float, options: dict):
    """CO2 with all options: beta, alpha, penalty, over, clip, delay, share, first, until.

    `share` is 0 unless eager; rounds before `first` and from `until` on wait. Flushed at the end.
    """
    delay, share = options["delay"], options["share"]
    outers = [Co2Outer(options) for _ in range(workers)]
    xs, sent, waited = [p] * workers, np.zeros((workers, SIZE)), False
    for t in range(len(data) // every):
        span = (t * every, (t + 1) * every)
        own = np.array([xs[i] - steps(xs[i], data, i, *span, rate) for i in range(workers)])
        waited = delay == 1 and (t < options["first"] or t >= options["until"])
        if waited:
            xs = [np.mean(xs - own - (1 - share) * sent, axis=0)] * workers
            sent = np.zeros_like(sent)
        else:
            late = np.mean(sent if delay else own, axis=0)
            xs = [
                xs[i] + outers[i].update(share * (own[i] - sent[i]) + late) for i in range(workers)
            ]
            sent = own
    if delay and not waited:
        late = np.mean(sent, axis=0)
        xs = [xs[i] + outers[i].update(-share * sent[i] + late) for i in range(workers)]
    return np.mean(xs, axis=0)
