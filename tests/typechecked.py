"""
Calls of the package are checked against their annotations while tests run.

Modules that write shapes with jaxtyping are checked by its hook, which pytest is told of (`pyproject.toml`): it looks
at what a whole call says together, and takes its time. All others are checked by beartype alone.
"""

from beartype import BeartypeConf
from beartype.claw import beartype_package

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

CHECKS = BeartypeConf(claw_is_pep526=False, is_pep484_tower=True, claw_skip_package_names=SHAPES + LATE)
beartype_package("bloomery", conf=CHECKS)
