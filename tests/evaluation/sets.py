"""Evaluation sets: the real ones, where they are, and small ones of one's own."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("BLOOMERY_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data" / "eval"
needs_sets = pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}; set BLOOMERY_SHARED")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
