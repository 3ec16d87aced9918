"""Tests. None of them cuts the power: what is to reach the disk for that costs a test milliseconds, hundreds of times."""

import os

os.fsync = os.fstat  # type: ignore[assignment]  # which wants an open file too
