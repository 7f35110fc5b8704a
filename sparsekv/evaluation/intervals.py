"""Bootstrap intervals of means over prompts and of ratios of such means."""

from __future__ import annotations

from collections.abc import Sequence

RESAMPLES, LEVEL = 2000, 0.95


def bootstrap(groups: Sequence[Sequence[float]], *, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of the groups' means, each group resampled on its own."""
    import numpy as np

    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for scores in groups:
        x = np.asarray(scores, dtype=float)
        means += x[rng.integers(0, len(x), (RESAMPLES, len(x)))].mean(1) / len(groups)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap_ratio(
    mine: Sequence[float], other: Sequence[float] | None = None, *, seed: int = 0,
) -> tuple[float, float, float]:
    """The mean over prompts, over that of another method (above 0) if one is given, and its percentile interval:
    prompts are drawn again with replacement, the same for both."""
    import numpy as np

    x = np.asarray(mine, dtype=float)
    y = np.ones_like(x) if other is None else np.asarray(other, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(x[drawn].mean(1) / y[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(x.mean() / y.mean()), float(low), float(high)
