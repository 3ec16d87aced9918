from pathlib import Path

import pytest

from tests.train.made import write_samples


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples to train and to validate on, which nobody writes to."""
    folder = tmp_path_factory.mktemp("shards")
    write_samples(folder)
    return folder
