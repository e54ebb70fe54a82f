"""Inputs are copied to where a recording reads them, by the driver or by torch; here the C library stands in for the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from hotfuse.backends.cuda.copies import InputCopies, bytes_in_a_row


class Driver:
    """Copies memory of the host, and counts."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.copied = code, list[tuple[int, int]]()

    def __call__(self, to: int, source: int, size: int, stream: int) -> int:
        if not self.code:
            ctypes.memmove(to, source, size)
            self.copied.append((size, stream))
        return self.code


KINDS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "plain": (lambda: torch.randn(3, 4), True),
    "turned": (lambda: torch.randn(5, 3, 4).permute(2, 0, 1), True),
    "channels last": (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
    "a part": (lambda: torch.randn(8, 12)[2:5], True),
    "columns": (lambda: torch.randn(8, 12)[:, 3:7], False),
    "bytes": (lambda: torch.randint(0, 9, (7,), dtype=torch.uint8), True),
    "truth": (lambda: torch.rand(9) > 0.5, True),
    "one": (lambda: torch.randn(1, 1), True),
    "a number": (lambda: torch.tensor(2.5), True),
    "empty": (lambda: torch.randn(0, 4), False),
    "half": (lambda: torch.randn(6).half(), True),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_byte_and_no_other(name: str) -> None:
    make, direct = KINDS[name]
    driver, first, then = Driver(), make(), make()
    around = torch.full((first.numel() + 64,), 7, dtype=first.dtype)  # what lies beside must stay
    dense = bytes_in_a_row(first) > 0
    own = around[32 : 32 + first.numel()].as_strided(first.shape, first.stride(), 32) if dense else first.clone()
    own.copy_(first)
    before, after = around[:32].clone(), around[32 + first.numel() :].clone()
    InputCopies([own], driver, lambda: 5, lambda: own.device.index)([then])
    assert torch.equal(own, then)
    assert torch.equal(around[:32], before) and torch.equal(around[32 + first.numel() :], after)
    assert driver.copied == ([(first.numel() * first.element_size(), 5)] if direct else [])


def test_what_the_driver_refuses_or_is_elsewhere_goes_through_torch() -> None:
    own, given = torch.zeros(4), torch.randn(4)
    InputCopies([own], Driver(code=201), lambda: 0, lambda: own.device.index)([given])
    assert torch.equal(own, given)
    driver = Driver()
    InputCopies([own], driver, lambda: 0, lambda: 3)([given * 2])
    InputCopies([own], None, lambda: 0, lambda: own.device.index)([given * 3])
    assert torch.equal(own, given * 3) and not driver.copied


def test_other_types_and_strides_are_not_taken_for_the_same_bytes() -> None:
    driver, own = Driver(), torch.zeros(4, 4)
    copies = InputCopies([own], driver, lambda: 0, lambda: own.device.index)
    given = torch.randn(4, 4)
    copies([given.t()])
    assert torch.equal(own, given.t())
    copies([given.double()])
    assert torch.equal(own, given) and not driver.copied
