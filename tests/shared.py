"""Real text, labels and evaluation sets, where they lie beside the project: $BLOOMERY_SHARED, or ../shared."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("BLOOMERY_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def needs(place: Path) -> pytest.MarkDecorator:
    """Of a test: without this file or folder it is skipped, and says so."""
    return pytest.mark.skipif(not place.exists(), reason=f"needs {place}; set BLOOMERY_SHARED")
