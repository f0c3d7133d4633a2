"""The peak of the GPU's tensor cores, and the share of it that a step reaches: model FLOPs utilisation (MFU)."""

import device

# Dense TF32 peaks in TFLOP/s with sums in fp32, from NVIDIA's datasheets and whitepapers, by the device's whole name
# without "NVIDIA ". A laptop's GPU, a slice of a GPU (MIG) and a virtual one have names of their own, and other peaks.
# Left out: names that stand for two GPUs (RTX 3050, RTX 3080), and Turing (RTX 20xx), which has neither TF32 nor bf16.
TF32_PEAKS = {
    # Data centre
    "GB300": 1250.0, "GB200": 1250.0, "B300 SXM6 AC": 1125.0, "B200": 1125.0,
    "GH200 480GB": 494.5, "GH200 144G HBM3e": 494.5, "H200": 494.5, "H200 NVL": 417.5,
    "H100 80GB HBM3": 494.5, "H100 PCIe": 378.0, "H100 NVL": 417.5,
    "A100-SXM4-40GB": 156.0, "A100-SXM4-80GB": 156.0, "A100-PCIE-40GB": 156.0, "A100 80GB PCIe": 156.0,
    "A800-SXM4-80GB": 156.0, "A800 80GB PCIe": 156.0,
    "A40": 74.8, "A30": 82.0, "A10": 62.5, "A2": 9.0, "L40S": 183.0, "L40": 90.5, "L4": 60.0,
    # GeForce for desktops
    "GeForce RTX 3060": 12.7, "GeForce RTX 3060 Ti": 16.2, "GeForce RTX 3070": 20.3, "GeForce RTX 3070 Ti": 21.7,
    "GeForce RTX 3080 Ti": 34.1, "GeForce RTX 3090": 35.6, "GeForce RTX 3090 Ti": 40.0,
    "GeForce RTX 4060": 15.1, "GeForce RTX 4060 Ti": 22.1, "GeForce RTX 4070": 29.1, "GeForce RTX 4070 SUPER": 35.5,
    "GeForce RTX 4070 Ti": 40.1, "GeForce RTX 4070 Ti SUPER": 44.1, "GeForce RTX 4080": 48.7,
    "GeForce RTX 4080 SUPER": 52.2, "GeForce RTX 4090": 82.6, "GeForce RTX 4090 D": 73.5,
    "GeForce RTX 5050": 13.2, "GeForce RTX 5060": 19.2, "GeForce RTX 5060 Ti": 23.7, "GeForce RTX 5070": 30.9,
    "GeForce RTX 5070 Ti": 43.9, "GeForce RTX 5080": 56.3, "GeForce RTX 5090": 104.8,
    # Workstations, whose tensor cores do not halve their rate for sums in fp32
    "RTX A2000": 16.0, "RTX A2000 12GB": 16.0, "RTX A4000": 38.3, "RTX A4500": 47.3, "RTX A5000": 55.6,
    "RTX A5500": 68.2, "RTX A6000": 77.4,
    "RTX 2000 Ada Generation": 24.0, "RTX 4000 SFF Ada Generation": 38.3, "RTX 4000 Ada Generation": 53.4,
    "RTX 4500 Ada Generation": 79.3, "RTX 5000 Ada Generation": 130.6, "RTX 5880 Ada Generation": 138.6,
    "RTX 6000 Ada Generation": 182.1,
    "RTX PRO 6000 Blackwell Workstation Edition": 251.9, "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 219.5,
}  # fmt: skip

TIMES_TF32 = {"tf32": 1, "bf16": 2, "fp16": 2, "fp8": 4}  # the peak in each precision, by TF32's


def tensor_core_peak() -> float | None:
    """The GPU's peak in FLOP/s for matrix products in the run's precision; in fp8 and fp16, for products of such
    numbers, although some of the run's operations are in bf16 or TF32. None if it is not known, or if products are in
    fp32."""
    peak = TF32_PEAKS.get(device.name.removeprefix("NVIDIA "))
    return TIMES_TF32[device.precision] * peak * 1e12 if device.precision in TIMES_TF32 and peak else None


def percent_of_peak(flops: float, ms: float) -> float | None:
    """The percentage of `tensor_core_peak` that `flops` operations in `ms` milliseconds reach: the model FLOPs
    utilisation, if `flops_per_token` has counted the operations. None if the peak is not known."""
    peak = tensor_core_peak()
    return 100 * flops / (ms / 1000) / peak if peak else None
