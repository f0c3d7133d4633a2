// Hopper's own instructions, which flash_attention_hopper.cu and the last product of the book (doc/ladder) share: wgmma
// and where its operands lie, mbarriers, the tensor memory accelerator (TMA), and setmaxnreg. Each has a twin in plain
// C++ for the CPU device.
#pragma once
#include "common.cuh"

// ---- tiles in shared memory

#ifdef LLMC_CPU
#define SHARED_TILES(name) bf16* const name = (bf16*)cpu_dynamic_shared()
#else
#define SHARED_TILES(name) extern __shared__ __align__(1024) bf16 name[]
#endif

// A tile lies in shared memory as wgmma wants it, in slabs of 64 columns. A row of a slab is 128 bytes, eight rows are
// 1024, and the tile begins at a multiple of 1024. The chunks of 16 bytes of row r are swizzled: chunk c lies where c ^
// (r % 8) would. wgmma reads an operand along the sum (queries and keys: HS) or across it (values). One order serves
// both.
template <int ROWS>
__device__ inline int swizzled_offset(int row, int column) {
    return column / 64 * ROWS * 64 + row * 64 + (column % 64 ^ row % 8 * 8);
}

__device__ inline unsigned shared_address(const bf16* p) {
#ifdef LLMC_CPU
    return (unsigned)((const char*)p - (const char*)cpu_dynamic_shared());
#else
    return (unsigned)__cvta_generic_to_shared(p);
#endif
}

// A descriptor tells wgmma where an operand lies in shared memory, in units of 16 bytes: from bit 0 on, where it
// begins; from bit 16 on, if its rows go across the sum, how far apart slabs are; from bit 32 on, how far apart groups
// of eight rows are. Bit 62 says that rows of 128 bytes are swizzled.
using Descriptor = unsigned long long;
__device__ inline Descriptor descriptor(unsigned address, int slab_bytes) {
    return (Descriptor)(address >> 4) | (Descriptor)(slab_bytes >> 4) << 16 | (Descriptor)64 << 32 |
           (Descriptor)1 << 62;
}
__device__ inline Descriptor descriptor(const bf16* tile, int slab_bytes) {
    return descriptor(shared_address(tile), slab_bytes);
}

// The descriptor of an operand that begins `numbers` numbers further on.
__device__ inline Descriptor further(Descriptor operand, int numbers) { return operand + (numbers * 2 >> 4); }

// ---- instructions

#ifdef LLMC_CPU
// swizzled: where a byte of an operand lies; bits 7 to 9 of its address flip bits 4 to 6. operand_at: where 16 bytes, a
// chunk of a row of queries or keys, lie. values_at: the same for values, whose rows go on in the next slab.
inline const char* swizzled(Descriptor operand, int at) {
    at += (int)(operand & 0x3fff) << 4;
    return (const char*)cpu_dynamic_shared() + (at ^ (at >> 7) % 8 << 4);
}
inline const char* operand_at(Descriptor operand, int row, int chunk) {
    return swizzled(operand, row / 8 * ((int)(operand >> 32 & 0x3fff) << 4) + row % 8 * 128 + chunk * 16);
}
inline const char* values_at(Descriptor operand, int row, int chunk) {
    return operand_at(operand + (chunk / 8 * (operand >> 16 & 0x3fff)), row, chunk % 8);
}

// The lane's part of operand a, 64 rows in shared memory.
inline void fragment(unsigned (&mine)[4], Descriptor a) {
    for (int i = 0; i < 4; i++) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
        mine[i] = *(const unsigned*)(operand_at(a, row, i / 2) + threadIdx.x % 4 * 4);
    }
}

// Does on a CPU what wgmma does, for a warp's 16 rows. The lanes fetch b together, in chunks.
template <bool ROWS, int N>
inline void emulate_wgmma(float (&d)[N][4], const unsigned (&a)[4], Descriptor b, bool add) {
    struct Lane { unsigned a[4]; uint4 b[N / 2]; float d[N][4]; } mine;
    for (int i = 0; i < 4; i++) mine.a[i] = a[i];
    for (int i = 0; i < N / 2; i++) {
        const int chunk = i * 32 + threadIdx.x % 32;
        mine.b[i] = *(const uint4*)(ROWS ? values_at(b, chunk / N, chunk % N)
                                         : operand_at(b, chunk % (8 * N), chunk / (8 * N)));
    }
    for (int i = 0; i < N * 4; i++) mine.d[i / 4][i % 4] = add ? d[i / 4][i % 4] : 0.0f;
    cpu_warp_together(0xffffffffu, mine, [](Lane* const lanes[32]) {
        float A[16][16], B[16][8 * N];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 8; i++) {
                const bf16 x = {(unsigned short)(lanes[lane]->a[i / 2] >> i % 2 * 16)};
                A[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = to_float(x);
            }
            for (int i = 0; i < N / 2 * 8; i++) {
                const int chunk = i / 8 * 32 + lane;
                const float x = to_float(((const bf16*)&lanes[lane]->b[i / 8])[i % 8]);
                if (ROWS) B[chunk / N][chunk % N * 8 + i % 8] = x;
                else B[chunk / (8 * N) * 8 + i % 8][chunk % (8 * N)] = x;
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < N * 4; i++) {
                const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                for (int k = 0; k < 16; k++) lanes[lane]->d[i / 4][i % 4] += A[row][k] * B[k][column];
            }
        }
    }, "wgmma");
    for (int i = 0; i < N * 4; i++) d[i / 4][i % 4] = mine.d[i / 4][i % 4];
}
#endif

// NUMBERS_OF_8, _16, _24 and _32 name all d[n][i] in the text of an instruction. FOUR and EIGHT_FOURS list them for the
// compiler.
#define TEN(n) \
    "%" #n "0, %" #n "1, %" #n "2, %" #n "3, %" #n "4, %" #n "5, %" #n "6, %" #n "7, %" #n "8, %" #n "9, "
#define NUMBERS_OF_8 "{" TEN() TEN(1) TEN(2) "%30, %31}"
#define NUMBERS_OF_16 "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63}"
#define NUMBERS_OF_24 \
    "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90, %91, %92, %93, %94, %95}"
#define NUMBERS_OF_32 \
    "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) \
    "%120, %121, %122, %123, %124, %125, %126, %127}"
#define FOUR(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define EIGHT_FOURS(d, n) \
    FOUR(d, n), FOUR(d, n + 1), FOUR(d, n + 2), FOUR(d, n + 3), FOUR(d, n + 4), FOUR(d, n + 5), FOUR(d, n + 6), \
    FOUR(d, n + 7)

// d (64, 8 N) = a (64, 16) b (16, 8 N), plus d if `add`; N is 8 or 16. The 128 threads of a warpgroup compute it
// together. Warp w has rows 16w .. 16w + 15 of a and of d. They are spread over its lanes as in mma_bf16: d[n] as its
// d, for columns 8n .. 8n + 7, and a as its a. b lies in shared memory, row by row. a may lie there, too: then b lies
// column by column. The instruction only starts the product: until wgmma_wait nobody may touch a, d, or the operands in
// shared memory.
template <int N>
__device__ inline void wgmma(float (&d)[N][4], const unsigned (&a)[4], Descriptor b, bool add) {
#ifdef LLMC_CPU
    emulate_wgmma<true>(d, a, b, add);
#else
    if constexpr (N == 8)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            NUMBERS_OF_8 ", {%32, %33, %34, %35}, %36, add, 1, 1, 1;}"
            : EIGHT_FOURS(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
    else
        asm volatile("{.reg .pred add; setp.ne.b32 add, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            NUMBERS_OF_16 ", {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#endif
}

template <int N>
__device__ inline void wgmma(float (&d)[N][4], Descriptor a, Descriptor b, bool add) {
#ifdef LLMC_CPU
    unsigned mine[4];
    fragment(mine, a);
    emulate_wgmma<false>(d, mine, b, add);
#else
    if constexpr (N == 8)
        asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            NUMBERS_OF_8 ", %32, %33, add, 1, 1, 0, 0;}" : EIGHT_FOURS(d, 0) : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            NUMBERS_OF_16 ", %64, %65, add, 1, 1, 0, 0;}"
            : EIGHT_FOURS(d, 0), EIGHT_FOURS(d, 8) : "l"(a), "l"(b), "r"((int)add));
#endif
}

// wgmma_fence comes between writes to registers of a product and the product. wgmma_commit ends a group of products.
// wgmma_wait waits until all groups but the last PENDING are done.
__device__ inline void wgmma_fence() {
#ifndef LLMC_CPU
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void wgmma_commit() {
#ifndef LLMC_CPU
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Tells the compiler that d is written here. So it moves no read of d before this line, and no write to after it.
// (CUTLASS calls this warpgroup_fence_operand.)
template <int N>
__device__ inline void fence_operand(float (&d)[N][4]) {
#ifndef LLMC_CPU
    #pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : FOUR(d, n) :: "memory");
#endif
}

template <int PENDING>
__device__ inline void wgmma_wait() {
#ifndef LLMC_CPU
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
#endif
}

// ---- the tensor memory accelerator (TMA), and mbarriers

// An mbarrier's phase ends when `count` threads have arrived and all bytes that they expect have come. barrier_wait
// waits until the phase of this parity has ended; phases count from 0, so a new barrier's phase of parity 1 has ended.
#ifdef LLMC_CPU
using Barrier = llmc::MBarrier;
struct TensorMap { const bf16* array; long long sequences, rows, columns, rest[12]; };  // as cpu.py packs it
#define OF_CALLER , LLMC_HERE  // its file and line, which the report of a deadlock names
#else
#define OF_CALLER
using Barrier = unsigned long long;
struct __align__(64) TensorMap { char bytes[128]; };  // a CUtensorMap

__device__ inline unsigned address_of(Barrier& barrier) { return (unsigned)__cvta_generic_to_shared(&barrier); }
#endif

__device__ inline void barrier_init(Barrier& barrier, int count) {
#ifdef LLMC_CPU
    llmc::mbarrier_init(barrier, count);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address_of(barrier)), "r"(count) : "memory");
#endif
}

// After this and a __syncthreads, all threads and the TMA see the barriers that the thread has initialised.
__device__ inline void barriers_ready() {
#ifndef LLMC_CPU
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// After this and a barrier, wgmma and the TMA see what the thread has written to shared memory.
__device__ inline void written_for_async() {
#ifndef LLMC_CPU
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void barrier_arrive(Barrier& barrier) {
#ifdef LLMC_CPU
    llmc::mbarrier_add(barrier, 1, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address_of(barrier)) : "memory");
#endif
}

// Arrives, too: the phase then waits for so many bytes of copy_box.
__device__ inline void barrier_expect(Barrier& barrier, int bytes) {
#ifdef LLMC_CPU
    llmc::mbarrier_add(barrier, 1, -bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :: "r"(address_of(barrier)), "r"(bytes) : "memory");
#endif
}

__device__ inline void barrier_wait(Barrier& barrier, int parity OF_CALLER) {
#ifdef LLMC_CPU
    cpu_mbarrier_wait(barrier, parity, file, line);
#else
    asm volatile("{.reg .pred ended; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1; "
        "@!ended bra AGAIN;}" :: "r"(address_of(barrier)), "r"(parity) : "memory");
#endif
}

// A warp arrives, when all its lanes are here: none still waits for the barrier's phase before, or reads.
__device__ inline void warp_arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

#ifdef LLMC_CPU
// The TMA moves whole sectors of 32 bytes. So its twin moves two chunks at a time, where both are inside the array.
struct Chunks { uint4 first, second; };
#endif

// Starts to copy a box, 64 columns of ROWS rows, to shared memory, swizzled. Numbers outside the array become zeros.
template <int ROWS>
__device__ inline void copy_box(bf16* to, const TensorMap& map, int column, int row, int sequence, Barrier& barrier) {
#ifdef LLMC_CPU
    for (int i = 0; i < ROWS; i++) {
        for (int chunk = 0; chunk < 8; chunk += 2) {
            const long long left = row + i < map.rows ? map.columns - column - chunk * 8 : 0;
            const bf16* from = map.array + (sequence * map.rows + row + i) * map.columns + column + chunk * 8;
            Chunks two = {};
            if (left >= 16) two = *(const Chunks*)from;
            else if (left > 0) two.first = *(const uint4*)from;
            *(uint4*)(to + i * 64 + (chunk ^ i % 8) * 8) = two.first;
            *(uint4*)(to + i * 64 + (chunk + 1 ^ i % 8) * 8) = two.second;
        }
    }
    llmc::mbarrier_add(barrier, 0, ROWS * 128);
#else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];"
        :: "r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(sequence), "r"(address_of(barrier))
        : "memory");
#endif
}

#ifdef LLMC_CPU
// The copies from shared memory that a thread has started. This twin makes each as late as it may: if a warp writes to
// the shared memory too early, the wrong numbers come to the array, and a test notices.
struct Stores {
    struct Box { const TensorMap* map; const bf16* from; int column, row, rows; } started[8];
    int count;
    unsigned long long block;
};

inline Stores& stores_of_thread() {
    static thread_local Stores of_thread[1024];
    Stores& mine = of_thread[threadIdx.x];
    if (mine.block != llmc::blocks_begun()) mine.count = 0, mine.block = llmc::blocks_begun();
    return mine;
}

inline void copy_out(const Stores::Box& box) {
    const TensorMap& map = *box.map;
    for (int i = 0; i < box.rows && box.row + i < map.rows; i++) {
        for (int chunk = 0; chunk < 8 && box.column + chunk * 8 < map.columns; chunk += 2) {
            bf16* const to = const_cast<bf16*>(map.array) + (box.row + i) * map.columns + box.column + chunk * 8;
            const Chunks two = {*(const uint4*)(box.from + i * 64 + (chunk ^ i % 8) * 8),
                                *(const uint4*)(box.from + i * 64 + (chunk + 1 ^ i % 8) * 8)};
            if (map.columns - box.column - chunk * 8 >= 16) *(Chunks*)to = two;
            else *(uint4*)to = two.first;
        }
    }
}
#endif

// The way back: starts to copy a box from shared memory. Numbers outside the array are not written. Before the warp
// writes to this shared memory again, the thread waits until all its copies but the last PENDING have been read.
template <int ROWS>
__device__ inline void store_box(const TensorMap& map, const bf16* from, int column, int row) {
#ifdef LLMC_CPU
    Stores& mine = stores_of_thread();
    assert(mine.count < 8);
    mine.started[mine.count++] = {&map, from, column, row, ROWS};
#else
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, 0}], [%3]; "
        "cp.async.bulk.commit_group;"
        :: "l"(&map), "r"(column), "r"(row), "r"(shared_address(from)) : "memory");
#endif
}

template <int PENDING>
__device__ inline void stores_read() {
#ifdef LLMC_CPU
    Stores& mine = stores_of_thread();
    const int due = max(0, mine.count - PENDING);
    for (int i = 0; i < due; i++) copy_out(mine.started[i]);
    mine.count -= due;
    for (int i = 0; i < mine.count; i++) mine.started[i] = mine.started[i + due];
#else
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
#endif
}

// ---- clusters: blocks that run at the same time, and reach each other's shared memory

// The blocks of a cluster. The CPU device runs a block by itself, so there each block is a cluster of its own.
#ifdef LLMC_CPU
constexpr int PAIR = 1;
#define CLUSTER_OF_A_PAIR
#else
constexpr int PAIR = 2;
#define CLUSTER_OF_A_PAIR __cluster_dims__(2, 1, 1)
#endif

// Waits for all threads of the cluster.
__device__ inline void cluster_wait() {
#ifdef LLMC_CPU
    __syncthreads();
#else
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// As copy_box, but to this place in each block of the pair, and each block's barrier at this place counts the bytes.
template <int ROWS>
__device__ inline void copy_box_to_pair(bf16* to, const TensorMap& map, int column, int row, Barrier& barrier) {
#ifdef LLMC_CPU
    copy_box<ROWS>(to, map, column, row, 0, barrier);
#else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, 0}], [%4], %5;"
        :: "r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(address_of(barrier)),
           "h"((unsigned short)3) : "memory");
#endif
}

// As warp_arrive, but at the barriers at this place in both blocks. The warp has only read: with .release.cluster the
// instruction would wait until the whole GPU sees its writes.
__device__ inline void warp_arrive_at_pair(Barrier& barrier) {
#ifdef LLMC_CPU
    warp_arrive(barrier);
#else
    __syncwarp();
    if (threadIdx.x % 32 < PAIR)
        asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
            "mbarrier.arrive.shared::cluster.b64 _, [there];}"
            :: "r"(address_of(barrier)), "r"(threadIdx.x % 32) : "memory");
#endif
}

// ---- the roles of warpgroups

// The thread's warpgroup. The shuffle tells the compiler that all lanes of a warp have the same one.
__device__ inline int warpgroup_of() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

// A multiprocessor has 65536 registers. At first each thread of a block has the same number of them. The producer needs
// few, so its warpgroup gives most of its registers back. The warpgroups that compute then take these.
template <int WARPGROUPS, int REGISTERS>
__device__ inline void give_registers() {
    constexpr int FIRST = 65536 / (128 * (WARPGROUPS + 1)) / 8 * 8;
    constexpr int LEFT = FIRST * (WARPGROUPS + 1) - REGISTERS * WARPGROUPS;
    static_assert(LEFT >= 24 && LEFT % 8 == 0, "else a warpgroup would wait forever for registers");
#ifndef LLMC_CPU
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(LEFT));
#endif
}

template <int REGISTERS>
__device__ inline void take_registers() {
#ifndef LLMC_CPU
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}

// How far a warp has come in a ring of STAGES: the stage, and the parity of the phase in which the stage is filled.
// (The name is CUTLASS's.)
template <int STAGES>
struct PipelineState {
    int stage = 0, parity = 0;
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ void skip(int stages) {
        stage += stages;
        parity ^= stage / STAGES % 2;
        stage %= STAGES;
    }
    __device__ int before() const { return stage > 0 ? stage - 1 : STAGES - 1; }
};
