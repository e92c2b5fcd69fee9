"""Model FLOPs utilisation: model FLOPs per second divided by the peak of the devices.

Model FLOPs are those of the model's own products, forward and backward, at true lengths: no recomputation, padding,
optimizer, normalisation or lookup. The peak is that of dense bf16 matrix products also where a run uses fp8.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class DevicePeak(NamedTuple):
    """What one device can do."""

    flops_per_second: float
    """Dense bf16 matrix products."""
    source: str
    """Where the number is from."""


# Vendors print the figure with 2:4 sparsity in large type; these are without. A name must match exactly: "NVIDIA GB200"
# is not a B200, an H100 PCIe has three quarters of an H100 SXM, an H20 less than a sixth.
_PEAKS: dict[str, DevicePeak] = {
    "NVIDIA A100-SXM4-40GB": DevicePeak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-SXM4-80GB": DevicePeak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-PCIE-40GB": DevicePeak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100 80GB PCIe": DevicePeak(312e12, "NVIDIA A100 datasheet"),
    "NVIDIA A10G": DevicePeak(70e12, "AWS and NVIDIA A10G specification"),
    "NVIDIA A10": DevicePeak(125e12, "NVIDIA A10 datasheet"),
    "NVIDIA L4": DevicePeak(121e12, "NVIDIA L4 datasheet, half of the figure with sparsity"),
    "NVIDIA L40S": DevicePeak(362e12, "NVIDIA L40S datasheet, without sparsity"),
    "NVIDIA H100 80GB HBM3": DevicePeak(989e12, "NVIDIA H100 SXM datasheet, half of the figure with sparsity"),
    "NVIDIA H100 PCIe": DevicePeak(756e12, "NVIDIA H100 PCIe datasheet, half of the figure with sparsity"),
    "NVIDIA H100 NVL": DevicePeak(835e12, "NVIDIA H100 NVL datasheet, half of the figure with sparsity"),
    "NVIDIA H200": DevicePeak(989e12, "NVIDIA H200 SXM datasheet, half of the figure with sparsity"),
    "NVIDIA H200 NVL": DevicePeak(835e12, "NVIDIA H200 NVL datasheet, half of the figure with sparsity"),
    "NVIDIA GH200 480GB": DevicePeak(989e12, "NVIDIA GH200 datasheet, half of the figure with sparsity"),
    "NVIDIA H20": DevicePeak(148e12, "NVIDIA H20 specification"),
    "NVIDIA B200": DevicePeak(2250e12, "NVIDIA HGX B200 datasheet, half of the figure with sparsity"),
    "NVIDIA GB200": DevicePeak(2500e12, "NVIDIA GB200 NVL72 datasheet, half of the figure with sparsity, per GPU"),
    "AMD Instinct MI300X": DevicePeak(1307.4e12, "AMD Instinct MI300X data sheet"),
}


class MFUAccount(NamedTuple):
    """An MFU, or why there is none."""

    mfu: float | None
    """Between 0 and 1."""
    peak_flops_per_second: float | None
    """Of one device."""
    explanation: str
    """The peak and its source, or the reason why mfu is None."""


def device_peak(device_name: str) -> DevicePeak | None:
    """Peak of a device by its exact name.

    Args:
        device_name: As from torch.cuda.get_device_name().

    Returns:
        The peak, or None for a name that is not in the table: no peak is better than that of another device.
    """
    return _PEAKS.get(device_name)


def mfu(flops: float, seconds: float, num_devices: int, peak: float) -> float:
    """Model FLOPs utilisation.

    Args:
        flops: Model FLOPs that all devices together did in the time.
        seconds: Wall time.
        num_devices: Devices.
        peak: FLOP/s of one device.

    Returns:
        flops / (seconds * num_devices * peak), in [0, 1].

    Raises:
        ValueError: if an argument is out of range, or the result is above 1: then FLOPs, time or peak are wrong.
    """
    for name, value in (("seconds", seconds), ("num_devices", num_devices), ("peak", peak)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"mfu: {name} must be finite and > 0, got {value}; measure it again")
    if not (math.isfinite(flops) and flops >= 0):
        raise ValueError(f"mfu: flops must be finite and >= 0, got {flops}; count the model's FLOPs")
    result = flops / (seconds * num_devices * peak)
    if result > 1.0:
        raise ValueError(
            f"mfu: must be <= 1, got {result:.3f} from {flops:g} FLOPs in {seconds:g} s on {num_devices} x {peak:g} "
            "FLOP/s; check that time includes the device's work (synchronise) and that the peak is this device's"
        )
    return result


def account(
    flops: float, seconds: float, num_devices: int, device_name: str, *, peak: float | None = None
) -> MFUAccount:
    """MFU with its peak and source, or the reason why there is none.

    Args:
        flops: Model FLOPs that all devices together did in the time.
        seconds: Wall time.
        num_devices: Devices.
        device_name: Name of the devices, all of one kind.
        peak: FLOP/s of one device, when the user states it.

    Returns:
        The account.

    Raises:
        ValueError: as `mfu`.
    """
    if peak is not None:
        known = DevicePeak(peak, "stated by the user")
    else:
        found = device_peak(device_name)
        if found is None:
            return MFUAccount(
                None,
                None,
                f"no MFU: the bf16 peak of {device_name!r} is not in the table of gem_train.mfu; state it to have one",
            )
        known = found
    explanation = f"{known.flops_per_second / 1e12:g} TFLOP/s dense bf16 per device ({known.source})"
    return MFUAccount(mfu(flops, seconds, num_devices, known.flops_per_second), known.flops_per_second, explanation)
