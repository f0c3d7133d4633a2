// gelu.cu in the erf form. A file of its own, because few models need it.
#include "../gelu_erf.cuh"
#include "gelu.cu"

extern "C" __global__ void __launch_bounds__(256, 4) gelu_erf_forward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, const floatX* inp,
    const floatX* bias, int N, int C) {
    forward_fp8({scale, previous_amax, block_amax, second_pass}, q, inp, bias, N, C);
}

extern "C" __global__ void __launch_bounds__(256, 3) gelu_erf_backward_fp8_kernel(
    float* scale, float* previous_amax, float* block_amax, int second_pass, unsigned char* q, unsigned char* q_T,
    floatX* out, unsigned char* out_T, const float* out_scale, float* partials, const floatX* dout, const floatX* inp,
    const floatX* bias, int N, int C, int rows) {
    backward_fp8({scale, previous_amax, block_amax, second_pass}, q, q_T, out, out_T, out_scale, partials, dout, inp,
                 bias, N, C, rows);
}
