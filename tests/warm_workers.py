"""
Processes that work on parts of data, forked from a server of Python's own that has imported what they need.

The server imports this module too, and what it starts ends with the server, which ends with the tests.
"""

import contextlib
import multiprocessing
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

from bloomery.core import child
from bloomery.stages import dedup, fetch, filter, shard  # noqa: F401  their imports take a second

STARTS = SimpleNamespace(get_context=lambda kind: multiprocessing.get_context("forkserver"))
"""In the place of the module `multiprocessing` where workers are started."""

if "pytest" in sys.modules:
    multiprocessing.set_forkserver_preload([__name__, "pytest"])
    with contextlib.chdir(Path(__file__).parents[1]):  # where it finds this module
        forkserver.ensure_running()
else:
    child.die_with = lambda parent: None
