"""Optional packages: there, or an error with the line that installs them."""

import pytest

from bloomery.core import errors
from bloomery.core.errors import DataError


def test_a_package_that_is_there_is_handed_over() -> None:
    assert errors.load("json.decoder", extra="web").JSONDecoder is not None


def test_a_package_that_is_missing_is_named_with_its_hint() -> None:
    with pytest.raises(DataError, match=r"no_such_package.*") as caught:
        errors.load("no_such_package.inner", extra="web")
    assert "pip install 'bloomery[web]'" in str(caught.value)
