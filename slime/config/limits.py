"""Upper ends of ranges that several flags share."""

MAX_SECONDS = 10**8
"""Three years; the clocks of some libraries overflow not far above."""
MAX_MINUTES = 10**6
MAX_SEED = 2**31 - 1
"""numpy takes 32 bits, and ranks and samples add their numbers to a seed."""

FREE = 0.05
"""Part of a file system in memory that snapshots leave to others: a full one kills who shares memory."""
