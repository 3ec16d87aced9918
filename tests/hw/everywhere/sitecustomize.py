"""Loaded by Python when it begins, before any program: torch will be pretended to be one for AMD (../hip_torch.py)."""

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("hip_torch", Path(__file__).parents[1] / "hip_torch.py")
assert spec is not None
assert spec.loader is not None
hip_torch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hip_torch)
sys.meta_path.insert(0, hip_torch.AfterImport())
