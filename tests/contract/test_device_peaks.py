"""What is measured of a device: the host stands in for one, with small sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hotfuse.base.settings import Settings
from hotfuse.cli import app
from hotfuse.compile.device.kept_peaks import BELIEVED_S, keep_peaks, kept_peaks, measured_rates
from hotfuse.machine.device_peaks import DevicePeaks, PeakSizes, measured_peaks, peaks_from

SMALL = PeakSizes(product=64, wide=64, memory=1 << 16, cache=1 << 14, copied=1 << 16)


@pytest.fixture(scope="module")
def peaks() -> DevicePeaks:
    return measured_peaks(torch.device("cpu"), SMALL)


def test_every_figure_is_measured_or_said_to_be_missing(peaks: DevicePeaks) -> None:
    assert {"f16", "bf16", "i8", "tf32", "f32"} == {*peaks.products, *peaks.missing} - {"graph node"}
    figures = [*peaks.products.values(), peaks.memory, peaks.cache, peaks.launch_s, peaks.kernel_s, peaks.to_device]
    assert all(math.isfinite(n) and n > 0 for n in figures)
    assert peaks.node_s is None and peaks.missing["graph node"]  # the host records nothing


def test_the_precision_of_products_is_as_it_was(peaks: DevicePeaks) -> None:
    assert "tf32" in peaks.products
    assert torch.get_float32_matmul_precision() == "highest"


def test_peaks_come_back_as_they_were_and_nothing_else_does(peaks: DevicePeaks) -> None:
    assert peaks_from(peaks.to_dict()) == peaks
    for spoiled in ({}, {**peaks.to_dict(), "memory": 0.0}, {**peaks.to_dict(), "products": None},
                    {**peaks.to_dict(), "memory": "fast"}):  # fmt: skip
        with pytest.raises(ValueError):
            peaks_from(spoiled)


def test_they_are_kept_by_the_devices_name_and_for_a_month(peaks: DevicePeaks, tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    assert kept_peaks(peaks.name, settings) is None
    assert keep_peaks(peaks, settings)
    assert kept_peaks(peaks.name, settings) == peaks
    assert kept_peaks("another", settings) is None
    assert keep_peaks(replace(peaks, at=peaks.at - BELIEVED_S - 60), settings)
    assert kept_peaks(peaks.name, settings) is None
    assert not keep_peaks(peaks, settings.with_(cache="off"))


def test_predictions_rest_on_what_was_measured(peaks: DevicePeaks) -> None:
    found = measured_rates(replace(peaks, products={"f32": 1e12}, memory=1e12, node_s=1e-6))
    assert found.measured
    assert found.seconds(1e9, 0, 100) == pytest.approx(1e9 / 0.5e12 + 1e-4)


@pytest.mark.parametrize("name, said", [("cpu", "not measured so"), ("nowhere", "names no device"), ("cuda:77", "no device")])
def test_a_device_that_is_not_there_is_the_callers_error(name: str, said: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--device", name])
    assert done.exit_code != 0
    assert said in done.output and "Traceback" not in done.output
