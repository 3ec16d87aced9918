import pytest

from bloomery.core import errors
from bloomery.core.errors import BloomeryError


@pytest.mark.parametrize("kind", ["ConfigError", "DataError", "CheckpointError", "HardwareError", "RunError"])
def test_an_error_says_where_what_and_what_to_do(kind: str) -> None:
    made = getattr(errors, kind)
    assert issubclass(made, BloomeryError)
    assert str(made("is torn", where="a.bin", cure="Make it again.")) == "a.bin: is torn\nMake it again."
    assert str(made("is torn", cure="Make it again.")) == "is torn\nMake it again."
    assert str(made("is torn")) == "is torn"
