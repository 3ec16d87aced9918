"""The command line as a test calls it: the fixture `call` of conftest.py."""

from collections.abc import Callable

Call = Callable[..., tuple[int, str, str]]
"""A verb with its arguments -> exit code, stdout, stderr."""
