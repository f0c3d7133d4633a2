// gelu.cu in the erf form. A file of its own, because few models need it.
#include "gelu_erf.cuh"
#include "gelu.cu"

extern "C" __global__ void PROGRAMMATIC gelu_erf_forward_kernel(floatX* out, const floatX* inp, const floatX* bias,
                                                                int N, int C) {
    forward(out, inp, bias, N, C);
}

extern "C" __global__ void __launch_bounds__(128, MATVEC_BLOCKS)
PROGRAMMATIC matvec_gelu_erf_kernel(SETS floatX* out, SETS floatX* fch, const floatX* inp, const floatX* weight,
                                    const floatX* bias, int C, int OC) {
    matvec_forward(out, fch, inp, weight, bias, C, OC);
}

extern "C" __global__ void gelu_erf_backward_kernel(floatX* dout, SETS floatX* out_T, SETS float* partials,
                                                    const floatX* inp, const floatX* bias, int N, int C, int rows) {
    backward(dout, out_T, partials, inp, bias, N, C, rows);
}
