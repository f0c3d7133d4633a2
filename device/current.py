"""Which device is in use, and which kernel files have been imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device.sources import Source

device: Any = None  # a CudaDevice, a CpuDevice, or one of them with an observer in front of it
sources: list[Source] = []


def switch(to: Any) -> None:
    """Makes `to` the device in use. Every kernel file looks its kernels up again, on that device."""
    global device
    device = to
    forget_kernels()


def forget_kernels() -> None:
    """Lets every kernel file look its kernels up again, because another device or precision has other kernels."""
    for source in sources:
        source.forget()
