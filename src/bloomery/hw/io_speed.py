"""
Measure memory and disk speed in a process of its own, and print one line of JSON.

The commands are `python -m bloomery.hw.io_speed memory` and `python -m bloomery.hw.io_speed FOLDER disk`. Each
prints one line of JSON. This module works without torch, so that it also runs where torch does not.
"""

import json
import os
import sys
import tempfile
import time

MEMORY_BYTES, DISK_BYTES = 2**27, 2**26


def memory_rate() -> float:
    """Bytes that one thread copies in a second, read and written counted once: the best of some rounds."""
    source, target = memoryview(bytearray(os.urandom(2**20) * (MEMORY_BYTES // 2**20))), bytearray(MEMORY_BYTES)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        memoryview(target)[:] = source
        times.append(time.perf_counter() - began)
    return MEMORY_BYTES / min(times)


def disk_rate(folder: str) -> float:
    """Bytes per second that a file of a folder takes until they are safe. The file is gone afterwards."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - began)


if __name__ == "__main__":
    rate = memory_rate() if sys.argv[-1] == "memory" else disk_rate(sys.argv[1])
    print(json.dumps({"bytes_per_second": rate}))
