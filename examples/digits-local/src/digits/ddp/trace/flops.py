"""The floating-point operations of a batch, and the shortest time in which this rank's GPU could make them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

log = logging.getLogger("ddp")


@dataclass(frozen=True)
class Peak:
    """Highest rates of matrix products on one device, in TFLOP/s: dense, though vendors also give them with sparsity.

    Summed up in fp32, as PyTorch has it; `fp32` is without TF32. None: there is none, or it is not known.
    """

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float | None
    units: int | None = None  # multiprocessors of the whole GPU, where its parts may bear the same name


_A100 = Peak(312, 312, 156, 19.5)
_H100 = Peak(989.5, 989.5, 494.5, 67)
_H100_NVL = Peak(835.5, 835.5, 417.5, 60)
_V100_SXM2, _V100_PCIE = Peak(None, 125, None, 15.7), Peak(None, 112, None, 14)
_MI300X = Peak(1307.4, 1307.4, None, None, units=304)

# By the whole name, as torch.cuda.get_device_name() has it. One that is not here has no known peak, since what is named
# almost alike has other numbers: a MIG instance ("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), a GPU that one provider has
# (A100-SXM-64GB, A10G), a GeForce in a laptop. "With sparsity": the source gives twice the number, for tensor cores.
PEAKS: dict[str, Peak] = {
    # NVIDIA Blackwell datasheet (3384703): one GPU of HGX B200 and of GB200 NVL72; with sparsity
    "NVIDIA B200": Peak(2250, 2250, 1100, 75),
    "NVIDIA GB200": Peak(2500, 2500, 1250, 80),
    # nvidia.com/en-us/data-center/h100 and /h200 (SXM and NVL); with sparsity
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H100,
    "NVIDIA H200 NVL": _H100_NVL,
    # GH200 Grace Hopper Superchip datasheet (3773000); the name has the memory of the CPU
    "NVIDIA GH200 120GB": _H100,
    "NVIDIA GH200 480GB": _H100,
    # NVIDIA H100 Tensor Core GPU Architecture (the white paper, where the first edition has other numbers)
    "NVIDIA H100 PCIe": Peak(756, 756, 378, 51.2),
    # nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    # nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf
    "NVIDIA A30": Peak(165, 165, 82, 10.3),
    # images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    "NVIDIA A40": Peak(149.7, 149.7, 74.8, 37.4),
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/datasheet-new/nvidia-a10-datasheet.pdf
    "NVIDIA A10": Peak(125, 125, 62.5, 31.2),
    # vgpu-L40-datasheet.pdf, l40s-datasheet-28413 and l4-datasheet-2595652 (with sparsity). L40S and L4 are not at half
    # the rate where products are summed up in fp32, as GeForce is: 252 and 91 have been measured in bf16
    # (github.com/mag-/gpu_benchmark), and 170 of an L40.
    "NVIDIA L40": Peak(181.05, 181.05, 90.5, 90.5),
    "NVIDIA L40S": Peak(362.05, 362.05, 183, 91.6),
    "NVIDIA L4": Peak(121, 121, 60, 30.3),
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    "Tesla T4": Peak(None, 65, None, 8.1),
    # volta-v100-datasheet-update-us-1165301-r5.pdf
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": Peak(None, 130, None, 16.4),
    # NVIDIA Ada GPU Architecture (v2.02), appendix A, and NVIDIA Ampere GA102 GPU Architecture (v2.0), appendix A:
    # "with FP32 Accumulate"; with FP16 it is twice as much
    "NVIDIA GeForce RTX 4090": Peak(165.2, 165.2, 82.6, 82.6),
    "NVIDIA GeForce RTX 3090": Peak(71, 71, 35.6, 35.6),
    # amd-instinct-mi200-datasheet.pdf (matrix; of an MI250X, a device is one die of two), MI210: the same with one die.
    # "MI250X / MI250", as ROCm calls PCI id 740c (libdrm's amdgpu.ids), is either of two GPUs.
    "AMD Instinct MI210": Peak(181, 181, None, 45.3),
    "AMD Instinct MI250X": Peak(191.5, 191.5, None, 47.9),
    # AMD CDNA 3 Architecture (white paper, PID 2258402-B). One can be split into up to 8 devices. VF: in a virtual
    # machine. In float32, 163.4 (122.6) or four times that as TF32, and PyTorch's settings do not say which: products
    # need HIPBLASLT_ALLOW_TF32, too (pytorch/pytorch#143549), and MIOpen has not heeded them (#190711).
    "AMD Instinct MI300A": Peak(980.6, 980.6, None, None, units=228),
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI300X VF": _MI300X,
    "AMD Instinct MI325X": _MI300X,
}


def peak_of(name: str, units: int) -> Peak | None:
    """Of a device with that name (torch.cuda.get_device_name) and so many multiprocessors; None if it is not known."""
    peak = PEAKS.get(name) or PEAKS.get(f"NVIDIA {name}")  # older drivers leave the maker out
    return peak if peak and peak.units in (None, units) else None


@dataclass(frozen=True)
class Work:
    """Of one batch of this rank, forward and backward. Seconds are None where the GPU's peak is not known."""

    flops: int
    least_s: float | None


_of_a_batch: list[Work] = []  # one, if it is known


def of_a_batch() -> Work | None:
    """What the rehearsal has counted."""
    return _of_a_batch[0] if _of_a_batch else None


def count(models: Sequence[nn.Module], step: Callable[[], object], device: torch.device) -> None:
    """Run `step` (forward and backward of a batch) once more, in eager mode, and count. Nothing if that fails.

    What the counter knows are matrix products, convolutions and attention (torch.utils.flop_counter): all else is
    little. Recomputed activations are counted as often as they are computed.
    """
    types: list[torch.dtype] = []

    def note(module: nn.Module, _inputs: object) -> None:
        on = torch.is_autocast_enabled(device.type)
        first = next(module.parameters(), torch.empty(0))
        types.append(torch.get_autocast_dtype(device.type) if on else first.dtype)

    _of_a_batch.clear()
    try:
        with ExitStack() as hooks, FlopCounterMode(display=False) as counter:
            hooks.enter_context(torch.compiler.set_stance("force_eager"))  # what is compiled is not seen
            for model in models:
                hooks.callback(model.register_forward_pre_hook(note).remove)
            step()
        found = counter.get_flop_counts().get("Global", {})
    except Exception as error:
        log.debug("floating-point operations were not counted: %s: %s", type(error).__name__, error)
        return
    if total := sum(found.values()):
        _of_a_batch[:] = [Work(total, _least_s(found, types[0] if types else torch.float32, device))]


def _least_s(found: Mapping[Any, int], dtype: torch.dtype, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    peak = peak_of(properties.name, properties.multi_processor_count)
    return least_s(found, peak, dtype, *_tf32()) if peak else None


def least_s(
    found: Mapping[Any, int], peak: Peak, dtype: torch.dtype, tf32_products: bool, tf32_convolutions: bool
) -> float | None:
    """Seconds for these operations (operator -> how many) at the peak of their type, or None if that is not known."""
    total = 0.0
    for operator, flops in found.items():
        tf32 = tf32_convolutions if "convolution" in str(operator) else tf32_products
        rates = {
            torch.bfloat16: peak.bf16,
            torch.float16: peak.fp16,
            torch.float32: peak.tf32 if tf32 and peak.tf32 else peak.fp32,
        }
        rate = rates.get(dtype)
        if rate is None:
            return None
        total += flops / (rate * 1e12)
    return total


def _tf32() -> tuple[bool, bool]:
    """Whether matrix products and convolutions of float32 may be made in TF32.

    Products: not with the "highest" of torch.set_float32_matmul_precision, which is the default, but with "high" and
    "medium". Convolutions have a setting of their own, torch.backends.cudnn.allow_tf32, and by default they may.
    """
    try:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer settings are in use (torch 2.9 and later), and it will not have both
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision == "tf32", backends.cudnn.conv.fp32_precision == "tf32"
