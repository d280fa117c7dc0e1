"""DAPO's soft overlong punishment: answers that come near their length limit lose reward, more and more."""


def soft_overlong_punishment(length: int, max_length: int, buffer: int) -> float:
    """DAPO (arXiv 2503.14476, eq. 13): 0 up to ``max_length - buffer``, then linearly down to -1.

    Args:
        length: tokens of the response.
        max_length: beyond it the punishment stays -1.
        buffer: tokens before it on which the punishment grows.
    """
    excess = length - (max_length - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
