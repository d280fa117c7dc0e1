"""Uniform noise as a function of a request's seed and the position of the token.

Counter-based, so that a token's noise depends neither on the batch it is drawn in nor on how often
its sequence was interrupted.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """``[B]`` float64 in [0, 1) from ``[B]`` uint64 seeds and token positions."""
    with np.errstate(over="ignore"):
        return (_mix(_mix(seeds) + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele, Lea and Flood 2014)."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
