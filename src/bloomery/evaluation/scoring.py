"""How sure a score is."""

import math


def wilson(successes: int, n: int) -> tuple[float, float]:
    """
    The 95 % interval of a share, after Wilson (1927): never outside 0 … 1, and honest for small n and shares near 1.

    (0, 1) for n = 0: nothing is known.
    """
    if n == 0:
        return 0.0, 1.0
    z = 1.959964
    share = successes / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # where the share is 0 or 1, so is the bound
