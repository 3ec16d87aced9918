"""
Event files of TensorBoard, written without it.

A record is an 8-byte length, its checksum, the bytes, their checksum; the bytes are a protocol buffer `Event`:

    1 wall_time double   2 step int64   3 file_version string   5 summary { 1 value { 1 tag string, 2 number float } }

The checksum is CRC-32C (Castagnoli), turned right by 15 bits, plus 0xa282ead8.
Source: https://github.com/tensorflow/tensorboard, record_writer.py and event.proto.
"""

import os
import platform
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

VERSION = "brain.Event:2"
CASTAGNOLI = 0x82F63B78


class EventFile:
    """One file of numbers by step. A resumed run begins another, which TensorBoard shows as the same run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self.path = folder / f"events.out.tfevents.{now:.6f}.{platform.node()}.{os.getpid()}"
        self._file = self.path.open("wb")
        self._add(_field(1, 1) + struct.pack("<d", now) + _bytes_field(3, VERSION.encode()))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = b"".join(
            _bytes_field(1, _bytes_field(1, name.encode()) + _field(2, 5) + struct.pack("<f", value))
            for name, value in numbers.items()
        )
        event = _field(1, 1) + struct.pack("<d", time.time()) + _field(2, 0) + _varint(step) + _bytes_field(5, values)
        self._add(event)

    def close(self) -> None:
        self._file.close()

    def _add(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _field(number: int, wire: int) -> bytes:
    return bytes([number << 3 | wire])


def _bytes_field(number: int, content: bytes) -> bytes:
    return _field(number, 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (CASTAGNOLI if entry & 1 else 0)
        table.append(entry)
    return table
