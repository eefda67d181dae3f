# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that is not there: a platform for vLLM, and the same for torch."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

_MEMORY = 96 << 30  # enough that no rule about small GPUs applies
_PROCESSORS = 132


class Device:
    """The simulated GPU, as the classes below and torch see it."""

    capability: ClassVar[tuple[int, int]] = (0, 0)
    backends_asked: ClassVar[Any] = None
    """The last result of vLLM's get_valid_backends."""


class _Simulated:
    """What a platform class asks NVML; mixed in before vLLM's own class."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        interface = import_module("vllm.platforms.interface")
        return interface.DeviceCapability(*Device.capability)

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        wanted = capability
        if isinstance(capability, int):
            wanted = divmod(capability, 10)
        return Device.capability >= tuple(wanted)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "simulated"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return _MEMORY

    @classmethod
    def get_valid_backends(cls, *args: Any, **kwargs: Any) -> Any:
        # Listens in on the selector, whose arguments differ between releases.
        Device.backends_asked = super().get_valid_backends(*args, **kwargs)  # type: ignore[misc]
        return Device.backends_asked


class _Relay:
    """``vllm.platforms.current_platform``, whichever platform is behind it now.

    Modules keep the object that they import by that name, and the CUDA platform's own
    module imports some of those. One object that changes its mind serves them all.
    """

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)


def install_platform() -> Any:
    """Make the simulated CUDA platform vLLM's current one; gives it back."""
    platforms = import_module("vllm.platforms")
    interface = import_module("vllm.platforms.interface")
    early = type(
        "EarlyCuda",
        (_Simulated, interface.Platform),
        {"_enum": interface.PlatformEnum.CUDA, "device_name": "cuda"},
    )
    relay = _Relay(early())
    platforms._current_platform = relay  # type: ignore[attr-defined]
    base = import_module("vllm.platforms.cuda").CudaPlatformBase
    relay.platform = type("SimulatedCuda", (_Simulated, base), {})()
    return relay.platform


def without_device(torch: Any) -> Any:
    """A context in which torch answers for the simulated GPU and allocates nothing.

    cutlass_mla allocates its workspace on the GPU when it is imported. On a meta
    device that costs nothing and needs no driver.
    """
    torch.cuda.get_device_capability = lambda device=None: Device.capability
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="simulated",
        major=Device.capability[0],
        minor=Device.capability[1],
        total_memory=_MEMORY,
        multi_processor_count=_PROCESSORS,
    )

    def on_meta(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)

    base = import_module("torch.overrides").TorchFunctionMode
    return type("OnMeta", (base,), {"__torch_function__": on_meta})()
