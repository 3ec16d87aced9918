"""Loaded by Python when it begins, before any program: torch will be pretended to be another (../hip_torch.py)."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.meta_path.insert(0, loaded("hip_torch").AfterImport(loaded(os.environ.get("PRETENDED_TORCH", "hip_torch")).pretend))
