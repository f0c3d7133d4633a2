// Before an exercise's file (exercises/checks.py): with -fsanitize=bounds the compiler calls this function where an
// index is outside of an array whose length it knows, a local one or one in shared memory. The launch fails there.
#pragma once
#if __has_include("cuda_on_cpu.h")  // not where the file is only searched for its kernels
#include "cuda_on_cpu.h"

struct IndexedType { unsigned short kind, info; char name[1]; };  // as the compiler lays them out
struct Indexed { const char* file; unsigned line, column; const IndexedType *array, *index; };

extern "C" __attribute__((visibility("hidden"), used, no_sanitize("thread")))
inline void __ubsan_handle_out_of_bounds_abort(const Indexed* place, unsigned long value) {
    const int unused = 64 - (1 << (place->index->info >> 1));  // bits above those of the index's type
    const bool is_signed = place->index->info & 1;
    const long index = is_signed ? (long)(value << unused) >> unused : (long)value;
    char message[200];
    snprintf(message, sizeof message, "index %ld is outside of the array, a %s,", index, place->array->name);
    llmc::fail(threadIdx, message, place->file, place->line);
}
#endif
