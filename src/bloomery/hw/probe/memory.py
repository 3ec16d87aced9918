"""Whether the memory that the device claims to have can be filled, freed and filled again."""

from bloomery.hw import needs_torch as needs_torch
from bloomery.hw.device import Device, find
from bloomery.hw.probe.compare import say, tell_device

import torch

SHARE = 0.8
PIECE_BYTES = 2**28


def refill(share: float = SHARE, piece_bytes: int = PIECE_BYTES) -> None:
    """Each piece is given a number of its own, which it must still hold when all of them are there."""
    device = find()
    tell_device(device)
    wanted = int(share * device.free_bytes())
    for round_ in (1, 2):
        say(trying=f"round {round_}: {wanted / 2**30:.1f} GiB")
        say(**{f"wrong_{round_}": _fill(device, wanted // piece_bytes, piece_bytes)})
        device.release()
    say(filled_bytes=wanted)


def _fill(device: Device, count: int, piece_bytes: int) -> int:
    """How many pieces do not hold what was written to them."""
    pieces = [
        torch.full((piece_bytes // 4,), number, dtype=torch.int32, device=device.place) for number in range(count)
    ]
    return sum(int(piece.min()) != number or int(piece.max()) != number for number, piece in enumerate(pieces))
