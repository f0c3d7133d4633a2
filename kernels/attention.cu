// Causal attention as textbooks have it. permute_kernel gathers the heads, (B, NH, T, HS). cuBLAS makes two products,
//   preatt = q k^T,   y = att v,   with att = softmax(preatt / sqrt(HS)) or the ReLU below, for s <= t, else 0.
// The other kernels turn preatt into att, in place: one (T, T) matrix for each head of each sequence.
// There may be fewer heads of keys and values, NKV, than of queries, NH: query head h uses key and value head
// h // (NH / NKV). The NH / NKV query heads of such a group are neighbours. So the products take them for one head
// with that many times T queries, and nobody has to repeat keys and values.
//   Softmax backward: dpreatt = att * (datt - sum_s(att * datt)) / sqrt(HS)
//   ReLU attention:   att = max(0, preatt / sqrt(HS)) / (t + 1);  dpreatt = datt / ((t + 1) sqrt(HS)) where att > 0
// All are memory-bound. They write 0 above the diagonal, because cuBLAS reads whole matrices.
#include "common.cuh"

// Where channel i of row n = (b, t) of a (B, T, NH * HS) tensor lies in a (B, NH, T, HS) tensor.
__device__ inline size_t head_offset(int n, int i, int T, int NH, int HS) {
    const int b = n / T, t = n % T, h = i / HS;
    return (((size_t)b * NH + h) * T + t) * HS + i % HS;
}

// The permutations. Block x takes row n of the B*T rows. A thread moves `width` channels of grid column y: WIDTH
// channels if HS is a multiple of WIDTH, else 1.
__device__ inline void move(floatX* to, const floatX* from, int width) {
    by_alignment(width == WIDTH, [&](auto memory) { memory.store(to, memory.load(from, width), width); });
}

// qkv (B,T,NH+2NKV,HS) -> q (B,NH,T,HS), k and v (B,NKV,T,HS), one after the other in qkvr. A thread moves channel i
// of q, and channel i of k and v if they have that many channels.
extern "C" __global__ void permute_kernel(floatX* qkvr, const floatX* qkv, int B, int T, int NH, int NKV, int HS,
                                          int width) {
    const int i = width * (blockIdx.y * blockDim.x + threadIdx.x), C = NH * HS, CKV = NKV * HS;
    if (i >= C) return;
    const floatX* row = qkv + (size_t)blockIdx.x * (C + 2 * CKV) + i;
    move(qkvr + head_offset(blockIdx.x, i, T, NH, HS), row, width);
    if (i >= CKV) return;
    floatX* k = qkvr + (size_t)B * T * C + head_offset(blockIdx.x, i, T, NKV, HS);
    move(k, row + C, width);
    move(k + (size_t)B * T * CKV, row + C + CKV, width);
}

// dqkvr, laid out like qkvr -> dqkv (B,T,NH+2NKV,HS).
extern "C" __global__ void permute_backward_kernel(floatX* dqkv, const floatX* dqkvr, int B, int T, int NH, int NKV,
                                                   int HS, int width) {
    const int i = width * (blockIdx.y * blockDim.x + threadIdx.x), C = NH * HS, CKV = NKV * HS;
    if (i >= C) return;
    floatX* row = dqkv + (size_t)blockIdx.x * (C + 2 * CKV) + i;
    move(row, dqkvr + head_offset(blockIdx.x, i, T, NH, HS), width);
    if (i >= CKV) return;
    const floatX* dk = dqkvr + (size_t)B * T * C + head_offset(blockIdx.x, i, T, NKV, HS);
    move(row + C, dk, width);
    move(row + C + CKV, dk + (size_t)B * T * CKV, width);
}

// inp (B,NH,T,HS) -> out (B,T,C).
extern "C" __global__ void unpermute_kernel(floatX* out, const floatX* inp, int T, int NH, int HS, int width) {
    const int i = width * (blockIdx.y * blockDim.x + threadIdx.x), C = NH * HS;
    if (i >= C) return;
    move(out + (size_t)blockIdx.x * C + i, inp + head_offset(blockIdx.x, i, T, NH, HS), width);
}

// dout (B,T,C) -> dinp (B,NH,T,HS).
extern "C" __global__ void unpermute_backward_kernel(SETS floatX* dinp, const floatX* dout, int T, int NH, int HS,
                                                     int width) {
    const int i = width * (blockIdx.y * blockDim.x + threadIdx.x), C = NH * HS;
    if (i >= C) return;
    move(dinp + head_offset(blockIdx.x, i, T, NH, HS), dout + (size_t)blockIdx.x * C + i, width);
}

// A warp takes a row of att (rows, T), rows = B*NH*T. Row t of a matrix has t + 1 entries. Block: (WARP_SIZE, rows).
extern "C" __global__ void softmax_forward_kernel(floatX* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows) return;
    const int lane = threadIdx.x, length = (int)(n % T) + 1;
    floatX* row = att + n * T;
    by_alignment(T % WIDTH == 0, [&](auto memory) {
        float largest = -INFINITY, sum = 0.0f;  // of this lane's part of the row, updated together (online softmax)
#pragma unroll 4
        for (int s = WIDTH * lane; s < length; s += WIDTH * WARP_SIZE) {
            const Vec x = memory.load(row + s, T - s);
            float new_largest = largest;
            for (int k = 0; k < WIDTH; k++) new_largest = s + k < length ? fmaxf(new_largest, x.x[k]) : new_largest;
            sum *= __expf(scale * (largest - new_largest));
            for (int k = 0; k < WIDTH; k++) sum += s + k < length ? __expf(scale * (x.x[k] - new_largest)) : 0.0f;
            largest = new_largest;
        }
        const float row_largest = warp_max(largest);
        const float norm = 1.0f / warp_sum(sum * __expf(scale * (largest - row_largest)));
#pragma unroll 4
        for (int s = WIDTH * lane; s < T; s += WIDTH * WARP_SIZE) {
            Vec x = {};
            if (s < length) x = memory.load(row + s, T - s);
            for (int k = 0; k < WIDTH; k++) {
                x.x[k] = s + k < length ? __expf(scale * (x.x[k] - row_largest)) * norm : 0.0f;
            }
            memory.store(row + s, x, T - s);
        }
    });
}

// datt (rows, T) becomes dpreatt in place.
extern "C" __global__ void softmax_backward_kernel(floatX* datt, const floatX* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows) return;
    const int lane = threadIdx.x, length = (int)(n % T) + 1;
    floatX* drow = datt + n * T;
    const floatX* row = att + n * T;
    by_alignment(T % WIDTH == 0, [&](auto memory) {
        float sum = 0.0f;
#pragma unroll 4
        for (int s = WIDTH * lane; s < length; s += WIDTH * WARP_SIZE) {
            const Vec d = memory.load(drow + s, T - s), a = memory.load(row + s, T - s);
            for (int k = 0; k < WIDTH; k++) sum += s + k < length ? d.x[k] * a.x[k] : 0.0f;
        }
        sum = warp_sum(sum);
#pragma unroll 4
        for (int s = WIDTH * lane; s < T; s += WIDTH * WARP_SIZE) {
            Vec d = {}, a = {};
            if (s < length) d = memory.load(drow + s, T - s), a = memory.load(row + s, T - s);
            for (int k = 0; k < WIDTH; k++) d.x[k] = s + k < length ? scale * a.x[k] * (d.x[k] - sum) : 0.0f;
            memory.store(drow + s, d, T - s);
        }
    });
}

extern "C" __global__ void relu_forward_kernel(floatX* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows) return;
    const int length = (int)(n % T) + 1;
    floatX* row = att + n * T;
    const float norm = scale / length;
    by_alignment(T % WIDTH == 0, [&](auto memory) {
#pragma unroll 4
        for (int s = WIDTH * threadIdx.x; s < T; s += WIDTH * WARP_SIZE) {
            Vec x = {};
            if (s < length) x = memory.load(row + s, T - s);
            for (int k = 0; k < WIDTH; k++) {
                x.x[k] = s + k >= length || x.x[k] <= 0.0f ? 0.0f : x.x[k] * norm;  // a NaN stays
            }
            memory.store(row + s, x, T - s);
        }
    });
}

extern "C" __global__ void relu_backward_kernel(floatX* datt, const floatX* att, float scale, size_t rows, int T) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows) return;
    const int length = (int)(n % T) + 1;
    const float norm = scale / length;
    by_alignment(T % WIDTH == 0, [&](auto memory) {
#pragma unroll 4
        for (int s = WIDTH * threadIdx.x; s < T; s += WIDTH * WARP_SIZE) {
            Vec d = {}, a = {};
            if (s < length) d = memory.load(datt + n * T + s, T - s), a = memory.load(att + n * T + s, T - s);
            for (int k = 0; k < WIDTH; k++) d.x[k] = s + k >= length || a.x[k] <= 0.0f ? 0.0f : d.x[k] * norm;
            memory.store(datt + n * T + s, d, T - s);
        }
    });
}
