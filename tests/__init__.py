"""Tests. None of them cuts the power, so none waits for the disk: that takes milliseconds, thousands of times."""

import os

os.fsync = os.fstat  # type: ignore[assignment]  # which wants an open file too
