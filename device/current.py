"""What is in use: the device, and who observes it."""

from collections.abc import Callable
from typing import Any

device: Any = None  # a CudaDevice or a CpuDevice
observers: list[Callable[..., None]] = []  # of what the device does (observing.py); the last one sees it first
