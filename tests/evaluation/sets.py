"""Evaluation sets: the real ones, where they are, and small ones of one's own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import shared

SETS = shared.SHARED / "data" / "eval"
needs_sets = shared.needs(SETS)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
