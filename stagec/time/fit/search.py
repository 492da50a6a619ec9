"""Two deterministic minimizers.

Times of kernels are step functions of their constants (tiles, waves), so they have no useful
gradients: `simplex` needs none. Times of collectives are smooth and have some twenty constants,
too many for a simplex: `least_squares` follows their slopes.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
#: Errors of `least_squares` beyond this one count linearly, not by their square.
OUTLIER = 0.1
#: A simplex has converged when the coordinates of its corners differ by no more than this.
_NEAR = 1e-4
#: The most steps of `least_squares`.
_STEPS = 60


def simplex(
    loss: Callable[[Floats], float], corners: Floats, most: int, flat: float = 1e-6
) -> Floats:
    """A point of least loss, searched from n + 1 corners (a row each) of n coordinates.

    The search ends after `most` steps, or when all corners are within `_NEAR` of the best one and
    their losses within `flat`. Source: Nelder and Mead, "A simplex method for function
    minimization", The Computer Journal 7, 1965.
    """
    points = corners.copy()
    losses = np.array([loss(p) for p in points])

    def order() -> None:
        rows = np.argsort(losses, kind="stable")
        points[:], losses[:] = points[rows], losses[rows]

    def take(point: Floats, value: float) -> None:
        points[-1], losses[-1] = point, value

    order()
    for _ in range(most):
        if np.abs(points[1:] - points[0]).max() <= _NEAR and losses[-1] - losses[0] <= flat:
            break
        middle: Floats = points[:-1].sum(axis=0) / (len(points) - 1)
        worst: Floats = points[-1].copy()
        turned: Floats = 2 * middle - worst
        value = loss(turned)
        if value < losses[0]:
            further: Floats = 3 * middle - 2 * worst
            wider = loss(further)
            take(*((further, wider) if wider < value else (turned, value)))
        elif value < losses[-2]:
            take(turned, value)
        else:
            outside = value < losses[-1]
            shorter: Floats = 1.5 * middle - 0.5 * worst if outside else 0.5 * middle + 0.5 * worst
            inner = loss(shorter)
            if inner <= value if outside else inner < losses[-1]:
                take(shorter, inner)
            else:
                points[1:] = points[0] + 0.5 * (points[1:] - points[0])
                losses[1:] = [loss(p) for p in points[1:]]
        order()
    best: Floats = points[0]
    return best


def least_squares(errors: Callable[[Floats], Floats], first: Floats) -> tuple[float, Floats]:
    """The least cost and its point, searched from a first point. Coordinates stay between -7 and 6.

    The cost is the sum of the squared errors, with Huber's loss beyond `OUTLIER`. Source: Levenberg
    and Marquardt (Nocedal and Wright, "Numerical Optimization", 2006, section 10.3) with weights
    for outliers; derivatives are finite differences.
    """

    def cost(r: Floats) -> float:
        a = np.abs(r)
        return float(np.where(a < OUTLIER, a * a, OUTLIER * (2 * a - OUTLIER)).sum())

    x, r, damping = first, errors(first), 1e-2
    best = cost(r)
    for _ in range(_STEPS):
        w: Floats = np.minimum(1, OUTLIER / np.maximum(np.abs(r), 1e-12))
        jac = np.stack([(errors(x + h) - r) / 0.02 for h in 0.02 * np.eye(len(x))], axis=1)
        normal: Floats = jac.T @ (jac * w[:, None])
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.eye(len(x)), -jac.T @ (w * r))
            tried: Floats = np.clip(x + np.clip(step, -1, 1), -7, 6)
            new = errors(tried)
            if cost(new) < best:
                break
            damping *= 4
        else:
            break
        gain, best = best - cost(new), cost(new)
        x, r, damping = tried, new, damping / 3
        if gain < 1e-6 * best:
            break
    return best, x
