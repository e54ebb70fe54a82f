"""In which order plans on a device are tried: padding first, then the likeliest generated kernels, then all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hotfuse.runtime.plan import UNTRIED
from hotfuse.runtime.tierup.improve import Improver, _device_kernels_due  # pyright: ignore[reportPrivateUsage]
from hotfuse.specialize.table import DEVICE_KERNELS, TUNED_KERNELS, AttemptKey


def entry(*layers: AttemptKey, untried: int = 0, refused: tuple[AttemptKey, ...] = ()) -> Any:
    plan = SimpleNamespace(layers=layers, counters=lambda: {UNTRIED: untried} if layers else {})
    return SimpleNamespace(plan=plan, refused=dict.fromkeys(refused, "it lost"))


@pytest.mark.parametrize(
    ("at", "due"),
    [
        (entry(), DEVICE_KERNELS),
        (entry(DEVICE_KERNELS, untried=7), TUNED_KERNELS),
        (entry(DEVICE_KERNELS, untried=7, refused=(TUNED_KERNELS,)), None),
        (entry(DEVICE_KERNELS), None),  # an earlier process chose, or all were tried
        (entry(refused=(DEVICE_KERNELS,)), TUNED_KERNELS),  # the likeliest lost: others may win
        (entry(DEVICE_KERNELS, refused=(DEVICE_KERNELS,)), None),  # they did
        (entry(refused=(DEVICE_KERNELS, TUNED_KERNELS)), None),
    ],
)
def test_the_likeliest_kernels_first_then_all_of_them_once(at: Any, due: AttemptKey | None) -> None:
    assert _device_kernels_due(at) == due


def test_nothing_is_generated_before_it_is_known_whether_rows_are_padding() -> None:
    improver = Improver.__new__(Improver)
    improver._specializes = False  # what asks is still being imported  # pyright: ignore[reportPrivateUsage]
    begun: list[AttemptKey] = []
    improver._attempt = lambda _entry, key, _propose: begun.append(key)  # type: ignore[method-assign] # pyright: ignore
    improver._consider_device(SimpleNamespace(), entry())  # type: ignore[arg-type] # pyright: ignore
    assert begun == []
