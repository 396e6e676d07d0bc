"""The error of a change between the ends of a series whose values are correlated, such as the rewards of steps."""

import math
from collections.abc import Sequence

import numpy as np

FEWEST_VALUES = 10
# Of the quadratic and of the correlation.
_FITTED = 4
# A random walk, 1.0, has no variance to compute with.
_MOST_CORRELATED = 0.97


def change_error(values: Sequence[float], edge: int) -> tuple[float, int]:
    """Standard error of the mean of the last `edge` values minus that of the first, and its degrees of freedom.

    The model is a quadratic in the place plus autoregressive noise: noise[t] = phi noise[t - 1] + new[t]. (Box, Jenkins
    and Reinsel, Time Series Analysis, section 3.2.) A fit makes noise look less correlated than it is. So phi is
    raised by about (3 + 6 phi) / n (Shaman and Stine, JASA 83, 1988, for a mean). FEWEST_VALUES values at least.
    """
    count = len(values)
    assert count >= FEWEST_VALUES, "the fit leaves some degrees of freedom"
    basis = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, count), 3))[0]
    series = np.asarray(values, np.float64)
    noise = series - basis @ (basis.T @ series)
    power = float(noise @ noise)
    found = float(noise[1:] @ noise[:-1]) / power if power else 0.0
    phi = min(max((found + 3 / count) / (1 - 6 / count), 0.0), _MOST_CORRELATED)
    degrees = count - 1 - _FITTED
    new = noise[1:] - phi * noise[:-1]
    variance = float(new @ new) / degrees / (1 - phi**2)
    places = np.concatenate([np.arange(edge), np.arange(count - edge, count)])
    weights = np.repeat([-1 / edge, 1 / edge], edge)
    correlated = phi ** np.abs(places[:, None] - places)
    return math.sqrt(variance * float(weights @ correlated @ weights)), degrees
