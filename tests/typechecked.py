"""
Calls of the package are checked against their annotations while tests run.

Modules that write shapes with jaxtyping are checked by its hook, which pytest is told of (`pyproject.toml`): it looks
at what a whole call says together, and takes its time. So only functions with shapes come to it, not with every call
of a long test, and all others are checked by beartype alone.
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import isclass, isfunction
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf
from beartype.claw import beartype_package
from jaxtyping import AbstractArray, jaxtyped

SHAPES = (
    "bloomery.generate.engine",
    "bloomery.generate.sampling",
    "bloomery.generate.scheduler",
    "bloomery.model",
    "bloomery.train.loss",
    "bloomery.train.preference",
)
"""The modules that write shapes; those of `addopts`."""
LATE = ("bloomery.cli", "bloomery.api", "bloomery.checks")
"""What names types that it does not load: nothing at run time can look them up."""

ALL_CALLS, ONE_CALL_OF = 16, 64
"""Of a function with shapes, in one test: so many calls are checked, and then some. A training repeats the same."""
test = 0

CHECKS = BeartypeConf(claw_is_pep526=False, is_pep484_tower=True, claw_skip_package_names=SHAPES + LATE)
beartype_package("bloomery", conf=CHECKS)


def names_shapes(annotation: Any) -> bool:
    """Whether a shape is part of an annotation; of one that is only text, nobody knows."""
    if isinstance(annotation, str) or (isclass(annotation) and issubclass(annotation, AbstractArray)):
        return True
    return any(map(names_shapes, get_args(annotation)))


def by_shapes(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """In the place of `jaxtyped`, with which the hook decorates what it imports."""
    if function is None:
        return partial(by_shapes, typechecker=typechecker)
    if not isfunction(function):
        return jaxtyped(function, typechecker=typechecker)
    if not any(map(names_shapes, function.__annotations__.values())):
        return typechecker(function)
    return _often(function, jaxtyped(function, typechecker=typechecker))


def _often(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    calls, of = 0, -1

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        nonlocal calls, of
        if of != test:
            calls, of = 0, test
        calls += 1
        return (function if calls > ALL_CALLS and calls % ONE_CALL_OF else checked)(*args, **named)

    return call


def begin_test() -> None:
    """From here on the calls of each function are counted anew."""
    global test
    test += 1


jaxtyping.jaxtyped = by_shapes  # type: ignore[assignment]
