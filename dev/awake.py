"""Keeps the links between GPUs awake until it is interrupted, by copies of 4 KB from each GPU to the next.

NVLink sleeps when it has not been used for 50 ms (`nvidia-smi nvlink -gLowPwrInfo`). Awake it draws power, however
little is sent, and a GPU at its limit of power then computes slower. A step on one GPU beside this program takes as
long as it would among several GPUs that had nothing to exchange (doc/gpus.md).
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device
from device.errors import UserError
from llmc.arguments import Parser
from llmc.program import run_program

EVERY, COPIED = 0.01, 4096  # seconds, bytes


def main() -> None:
    Parser(description=__doc__.partition("\n")[0]).parse_args()
    if device.use() == "cpu":
        raise UserError(f"CUDA does not work here ({device.why_not_cuda}), and the CPU has no links to keep awake")
    import cupy
    from cupy.cuda import runtime

    count, buffers, streams = runtime.getDeviceCount(), [], []
    if count < 2:
        raise UserError("one GPU has no link to another")
    for gpu in range(count):
        if not runtime.deviceCanAccessPeer(gpu, (gpu + 1) % count):
            raise UserError(f"GPU {gpu} does not reach the memory of GPU {(gpu + 1) % count}: they have no link")
        with cupy.cuda.Device(gpu):
            runtime.deviceEnablePeerAccess((gpu + 1) % count)
            buffers.append(cupy.zeros((2, COPIED), cupy.uint8))
            streams.append(cupy.cuda.Stream(non_blocking=True))
    print(f"the links between {count} GPUs are awake until Ctrl-C", flush=True)
    while True:
        for gpu, stream in enumerate(streams):
            with cupy.cuda.Device(gpu):
                there, here = buffers[(gpu + 1) % count][0], buffers[gpu][1]
                runtime.memcpyAsync(there.data.ptr, here.data.ptr, COPIED, runtime.memcpyDeviceToDevice, stream.ptr)
        time.sleep(EVERY)


if __name__ == "__main__":
    run_program(main)
