"""The CPU device: CUDA kernel files compiled by the system's C++ compiler and run on NumPy arrays.

`cuda_on_cpu.h` makes a `.cu` file C++, `runtime.cpp` runs grids, blocks and threads, `compiler.py` builds and caches
both, and `launch.py` calls a kernel with checked arguments. `products.cu` multiplies matrices. They read these
environment variables:

    CXX                   the compiler; by default g++, or clang++ if there is no g++
    LLMC_CPU_CXXFLAGS     further compiler flags
    LLMC_CPU_DEBUG=1      -O0 -g, for gdb: break layernorm.cu:30 if threadIdx.x == 37
    LLMC_CPU_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer (Python needs their libraries preloaded)
    LLMC_CPU_MICROSCOPE=1 records every access; dev/microscope sets it
    LLMC_CPU_WARP         lanes in a warp, 1 (default) or 32. A file that says `#define WARP_SIZE 32` always has 32
    LLMC_CPU_THREADS      OS threads that run blocks; by default one for each core that the process may use
    LLMC_CPU_ORDER        forward (default) or shuffled: the order of a block's threads between two waits, and of a
                          grid's blocks. A kernel whose result depends on it lacks a barrier. Shuffled also fills shared
                          memory with NaNs before each block
    LLMC_CACHE_DIR        the directory of compiled files; by default llm.cupy in $XDG_CACHE_HOME or ~/.cache
                          (~/.cache-UID, if the home directory is not this user's)
    LLMC_QUIET=1          nothing is said on stderr while kernels compile (on a GPU, too)
"""

from device.cpp.compiler import compile_all, compile_source, threads, warp_size
from device.cpp.launch import Kernel, KernelError, Module

__all__ = ["Kernel", "KernelError", "Module", "compile_all", "compile_source", "threads", "warp_size"]
