import json
from typing import Any

import pytest

from bloomery.core.errors import HardwareError
from bloomery.hw.specs import CATALOG, GIB, named, of_device
from tests.shared import SHARED, needs

FACTS = SHARED / "reference" / "hardware.json"


def test_every_key_is_there_once_and_is_found_by_itself() -> None:
    assert len({entry.key for entry in CATALOG}) == len(CATALOG)
    assert all(named(entry.key) is entry for entry in CATALOG)


def test_a_person_may_write_a_name_in_any_way() -> None:
    for name in ("7900xtx", "RX 7900 XTX", "rx-7900-xtx"):
        assert named(name).key == "7900xtx"
    assert named("RTX4090") is named("rtx-4090")
    assert named("strix halo 128").memory_bytes == 128 * GIB


@pytest.mark.parametrize("name", ["Radeon RX 7900 XTX", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"])
def test_a_person_may_write_what_the_driver_says(name: str) -> None:
    assert named(name) is of_device(name)


@pytest.mark.parametrize("name", ["8060s", "AMD Radeon 8060S Graphics", "rtx 4060 ti", "RTX 5060 Ti"])
def test_a_name_of_several_sizes_is_asked_for_until_a_size_is_said(name: str) -> None:
    with pytest.raises(HardwareError, match="several devices") as told:
        named(name)
    keys = told.value.hint.removeprefix("Use ").removesuffix(".").split(" or ")
    assert len(keys) > 1
    sizes = [named(key).memory_bytes for key in keys]
    assert [named(name, size).key for size in sizes] == keys


def test_an_unknown_name_is_told_with_what_is_near() -> None:
    with pytest.raises(HardwareError, match="strix-halo-128 or strix-halo-96 or strix-halo-64"):
        named("strix-halo")
    with pytest.raises(HardwareError, match="mi300x"):
        named("mi300y")
    with pytest.raises(HardwareError, match="--memory SIZE"):
        named("voodoo")


@pytest.mark.parametrize(
    ("said", "memory_gib", "key"),
    [
        ("AMD Radeon RX 7900 XTX", 24, "7900xtx"),
        ("AMD Radeon RX 7900 XT", 20, "7900xt"),
        ("AMD Instinct MI250X", 64, "mi250x"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("Radeon 8060S Graphics", 62.5, "strix-halo-64"),
        ("AMD Radeon 8060S", 120, "strix-halo-128"),
        ("NVIDIA H100 PCIe", 79, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
        ("NVIDIA GeForce RTX 4060 Ti", 8, "rtx-4060-ti-8"),
        ("NVIDIA L4", 22, "l4"),
        ("Apple M4 Max", 64, "apple-m4-max"),
    ],
)
def test_a_device_is_found_by_what_its_driver_calls_it(said: str, memory_gib: float, key: str) -> None:
    found = of_device(said, int(memory_gib * GIB))
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize("said", ["NVIDIA L40S", "Apple M1 Pro", "Intel(R) Xeon(R)", "AMD Radeon RX 6800", "RTX 40900"])
def test_a_device_that_is_not_listed_borrows_no_peak(said: str) -> None:
    assert of_device(said, 48 * GIB) is None


@pytest.mark.parametrize(
    "said",
    ["rtx 3060 ti", "9060 xt 8gb", "rtx 4090 laptop", "RTX 4070 Ti SUPER", "h100 nvl", "a100 40gb"],
)
def test_a_variant_or_another_size_of_a_listed_device_is_not_that_device(said: str) -> None:
    with pytest.raises(HardwareError, match="is not known"):
        named(said)
    assert of_device(f"NVIDIA GeForce {said}", 16 * GIB) is None


@pytest.mark.parametrize(("said", "key"), [("9060 xt 16gb", "9060xt"), ("rtx 4060 ti 8gb", "rtx-4060-ti-8")])
def test_a_size_in_a_name_chooses_between_sizes(said: str, key: str) -> None:
    assert named(said).key == key


def test_formats_without_units_have_no_peak() -> None:
    assert named("t4").peak("bfloat16") is None
    assert named("t4").peak("float16") == pytest.approx(65.1e12)
    assert named("mi50").peak("bfloat16") is None
    assert named("7900xtx").peak("float32") is None


@needs(FACTS)
def test_the_catalog_has_the_numbers_that_were_collected() -> None:
    """Against the collected facts, where they are at hand: each device of them is here, with its rate."""
    collected: list[dict[str, Any]] = json.loads(FACTS.read_text())["devices"]
    known = [(name, entry) for entry in CATALOG for name in entry.names]
    for device in collected:
        entries = [entry for name, entry in known if any(name.endswith(match) for match in device["match"])]
        assert entries, device["key"]
        rate = device["bf16_dense_tflops"]
        assert any(
            entry.peak("bfloat16") == (None if rate is None else pytest.approx(rate * 1e12, rel=0.002))
            for entry in entries
        ), device["key"]
