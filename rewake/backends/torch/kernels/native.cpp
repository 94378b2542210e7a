// The library: one C interface over the instruction sets, and the splitting of a step's attention over threads.
// Includes the same kernels once per instruction set. Knows nothing of torch, Python or who owns a page.
#include "abi.h"
#include "pool.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>
#if defined(__x86_64__) || defined(_M_X64)
#define REWAKE_X86 1
#include <immintrin.h>
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define REWAKE_HAS_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

// 2^x on [-0.5, 0.5] by powers of x: 1e-4, and exact at 0 (fitted by least squares). One power more would give 3e-6.
constexpr float EXP2[4] = {1.f, 0.6932828876768763f, 0.24221017887225446f, 0.05500850106759073f};
// The same on [0, 1], to 9e-5 (fitted to the least maximum), times 1.00282: by so much bfloat16 is smaller on average when it is rounded down.
constexpr float EXP2_UP[4] = {1.00281776f, 0.697075595f, 0.228285851f, 0.0772847431f};
constexpr float ROUNDING = 12582912.f;  // 1.5 * 2^23: added to a small number, it leaves the nearest integer in the low bits

constexpr float LOG2_E = 1.44269504088896341f;

inline float from_f16(const void* p) {
    uint16_t half;
    memcpy(&half, p, 2);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, bits = (uint32_t)(half & 0x7FFF) << 13;
    float x;
    if (half & 0x7C00) {
        const uint32_t moved = sign | (bits + (112u << 23));  // finite values only
        memcpy(&x, &moved, 4);
        return x;
    }
    x = (float)(half & 0x3FF) * 0x1p-24f;  // below 2^-14 there is no leading 1
    return sign ? -x : x;
}

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(REWAKE_X86)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#endif
#if defined(REWAKE_HAS_AMX)
#define REWAKE_TILES 1
#endif
namespace avx512 {
#include "simd_avx512.h"
#include "kernels_append.h"
#include "kernels_scores.h"
#include "kernels_codes.h"
#include "kernels_linear.h"
#include "kernels_values.h"
#include "kernels_attend.h"
#if defined(REWAKE_TILES)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8,amx-bf16")
#endif
#include "kernels_tiles.h"
#include "kernels_attend_tiles.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
constexpr Kernels tiled_kernels = {append, prepare, attend_tiled, merge, scratch_bytes, &tiled_linear_kernels};
#endif
}  // namespace avx512
#undef REWAKE_TILES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include "simd_avx2.h"
#include "kernels_append.h"
#include "kernels_scores.h"
#include "kernels_codes.h"
#include "kernels_linear.h"
#include "kernels_values.h"
#include "kernels_attend.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace portable {
#include "simd_portable.h"
#include "kernels_append.h"
#include "kernels_scores.h"
#include "kernels_codes.h"
#include "kernels_linear.h"
#include "kernels_values.h"
#include "kernels_attend.h"
}  // namespace portable

namespace {

enum Isa { AMX, AVX512, AVX2, PORTABLE, ISAS };

#if defined(REWAKE_HAS_AMX)
// Tile registers are there, and the system lets this process use them: it is asked once.
bool has_tiles() {
    static const bool has = [] {
        constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
    }();
    return has;
}
#endif

bool supported(int isa) {
#if defined(REWAKE_X86)
    __builtin_cpu_init();
#if defined(REWAKE_HAS_AMX)
    if (isa == AMX) return supported(AVX512) && has_tiles();
#endif
    if (isa == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (isa == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return isa == PORTABLE;
}

const Kernels* kernels_of(int isa) {
    if (isa < 0 || isa >= ISAS || !supported(isa)) return nullptr;
#if defined(REWAKE_X86)
#if defined(REWAKE_HAS_AMX)
    if (isa == AMX) return &avx512::tiled_kernels;
#endif
    if (isa == AVX512) return &avx512::kernels;
    if (isa == AVX2) return &avx2::kernels;
#endif
    return &portable::kernels;
}

// Memory that a thread keeps between calls; contents are not.
class Buffer {
  public:
    ~Buffer() { release(); }
    void* get(size_t bytes) {
        if (bytes > size_) {
            release();
            size_ = (bytes + 4095) / 4096 * 4096;
            data_ = ::operator new(size_, std::align_val_t(64));
        }
#if defined(REWAKE_POISON)
        memset(data_, 0xFF, size_);  // the self-test's: nothing may rely on what an earlier call left
#endif
        return data_;
    }

  private:
    void release() {
        if (data_) ::operator delete(data_, std::align_val_t(64));
        data_ = nullptr;
        size_ = 0;
    }
    void* data_ = nullptr;
    size_t size_ = 0;
};
thread_local Buffer scratch_buffer, query_buffer, partial_buffer, step_buffer;

// Runs work(first, last) over [0, count), one by one if that is not too many, on up to so many threads.
template <class Work> void share_out(int threads, int64_t count, Work work) {
    const int64_t piece = std::max<int64_t>(1, (count + Pool::MOST_PIECES - 1) / Pool::MOST_PIECES);
    const int64_t pieces = (count + piece - 1) / piece;
    if (threads <= 1 || pieces <= 1) {
        if (count > 0) work(0, count);
        return;
    }
    auto one = [&](int64_t i) { work(i * piece, std::min(count, (i + 1) * piece)); };
    Pool::get().run(threads, pieces, one);
}

// The same for work that is alike: pieces become smaller, down to `least`, so that nobody waits long for the last one.
template <class Work> void share(int threads, int64_t count, int64_t least, Work work) {
    constexpr int64_t MOST = 256;
    if (threads <= 1 || count <= least) {
        if (count > 0) work(0, count);
        return;
    }
    int64_t ends[MOST], pieces = 0;
    least = std::max(least, (count + MOST - 1) / MOST);
    for (int64_t at = 0; at < count; pieces++) ends[pieces] = at = std::min(count, at + std::max(least, (count - at) / (2 * threads)));
    auto one = [&](int64_t i) { work(i ? ends[i - 1] : 0, ends[i]); };
    Pool::get().run(threads, pieces, one);
}

// What the C++ side must be sure of before it follows an offset; 0 or the number of what is wrong.
enum Refusal { OK, BAD_ISA, BAD_LAYOUT, BAD_LENGTH, BAD_PAGE, BAD_CODEC, BAD_ROW, BAD_TOKEN };

bool usable(const RwLayout& l) {
    const auto bits_ok = [](int bits) { return bits == 4 || bits == 8 || bits == 16; };
    return l.kv_heads > 0 && l.k_dim > 0 && l.k_dim <= MAX_DIM && l.v_dim >= 0 && l.v_dim <= MAX_DIM &&
           (l.group == 32 || l.group == 64) && (!l.residual_layer_bytes || (l.k_bits == 4 && l.v_bits == 4)) && bits_ok(l.k_bits) && bits_ok(l.v_bits) && (l.k_bits == 16) == (l.v_bits == 16);
}

bool page_fits(int64_t offset, const RwLayout& l, int layer, int64_t arena_bytes) {
    return offset >= 0 && offset % 4 == 0 && offset <= arena_bytes - l.page_bytes && layer >= 0 && (layer + 1) * l.layer_bytes <= l.page_bytes;
}

bool residuals_fit(const int64_t* places, int64_t entry, const RwLayout& l, int layer, int64_t arena_bytes) {
    if (!l.residual_layer_bytes) return true;
    return places && places[entry] >= 0 && places[entry] + (layer + 1) * l.residual_layer_bytes <= arena_bytes;
}

Refusal check_append(const AppendJob& job, int64_t arena_bytes) {
    const RwBatch& b = *job.batch;
    for (int t = 0; t < b.tokens; t++) {
        if (b.append_pages[t] < 0) continue;
        if (b.append_codecs[t] >= CODECS || !usable(job.layouts[b.append_codecs[t]])) return BAD_CODEC;
        if (!page_fits(b.append_pages[t], job.layouts[b.append_codecs[t]], job.layer->layer, arena_bytes)) return BAD_PAGE;
        if (!residuals_fit(b.append_residuals, t, job.layouts[b.append_codecs[t]], job.layer->layer, arena_bytes)) return BAD_PAGE;
        if (b.append_rows[t] < 0 || b.append_rows[t] >= PAGE) return BAD_ROW;
    }
    return OK;
}

int64_t oldest_page(const AttendJob& job, int seq) {
    const RwBatch& b = *job.batch;
    const int64_t first = b.kv_lengths[seq] - (b.query_starts[seq + 1] - b.query_starts[seq]);
    return job.layer->window ? std::max<int64_t>(0, first - job.layer->window + 1) / PAGE : 0;
}

Refusal check_attend(const AttendJob& job, int64_t arena_bytes) {
    const RwBatch& b = *job.batch;
    if (b.query_starts[0] != 0 || b.query_starts[b.seqs] != b.tokens) return BAD_LENGTH;
    for (int s = 0; s < b.seqs; s++) {
        const int64_t rows = b.query_starts[s + 1] - b.query_starts[s], length = b.kv_lengths[s];
        if (rows < 0 || length < rows || length > (int64_t)b.max_pages * PAGE) return BAD_LENGTH;
        if (rows == 0) continue;
        for (int64_t p = oldest_page(job, s); p * PAGE < length; p++) {
            const int codec = b.page_codecs[(int64_t)s * b.max_pages + p];
            if (codec >= CODECS || !usable(job.layouts[codec]) || (job.layouts[codec].k_bits == 16) != job.raw ||
                (job.layouts[codec].residual_layer_bytes > 0) != job.residuals)
                return BAD_CODEC;
            const int64_t entry = (int64_t)s * b.max_pages + p;
            if (!page_fits(b.block_table[entry], job.layouts[codec], job.layer->layer, arena_bytes)) return BAD_PAGE;
            const bool is_young = p == 0 || length - rows < (p + 1) * PAGE + YOUNG;
            if (is_young && !residuals_fit(b.residuals, entry, job.layouts[codec], job.layer->layer, arena_bytes)) return BAD_PAGE;
        }
    }
    return OK;
}

// The part of a latent K row that V depends on: the rotation mixes whole blocks.
int latent_width(int k_dim, int v_dim) {
    int start = 0;
    while (start < v_dim) {
        int size = 1;
        while (2 * size <= k_dim - start) size *= 2;
        start += size;
    }
    return start;
}

int round_up(int n, int to) { return (n + to - 1) / to * to; }

const RwLayout* first_layout(const AttendJob& job) {
    const RwBatch& b = *job.batch;
    for (int s = 0; s < b.seqs; s++)
        if (b.query_starts[s + 1] > b.query_starts[s])
            return &job.layouts[b.page_codecs[(int64_t)s * b.max_pages + oldest_page(job, s)] % CODECS];
    return nullptr;
}

void derive(AttendJob& job, const RwLayout& l, const Kernels& kernels) {
    job.kv_heads = l.kv_heads;
    job.share = job.q_heads / l.kv_heads;
    job.k_dim = l.k_dim;
    job.group = l.group;
    job.raw = l.k_bits == 16;
    job.residuals = l.residual_layer_bytes > 0;
    job.k_groups = job.raw ? 0 : (l.k_dim + l.group - 1) / l.group;
    job.k_padded = job.raw ? round_up(l.k_dim, 16) : job.k_groups * l.group;
    job.v_dim = job.layer->k_prefix ? job.layer->k_prefix : l.v_dim;
    job.v_width = job.layer->k_prefix && !job.raw ? latent_width(l.k_dim, job.v_dim) : job.v_dim;
    job.v_groups = job.raw ? 0 : (job.v_width + l.group - 1) / l.group;
    job.q_stride = job.k_padded * (job.raw ? 2 : 1);
    job.accum_stride = ACCUM_HEAD + round_up(job.v_width, job.raw ? 64 : l.group);
    job.row_block = job.accum_stride > 320 ? 32 : 64;  // whole tile registers
    const bool tiles = kernels.linear->tiles && !job.raw && job.group == 64;
    job.prompt_block = !tiles ? 0 : job.accum_stride > 320 ? 64 : 192;  // what is summed, and a page decoded, fit the second-level cache
}

// Rows of a sequence whose spans are summed apart and merged afterwards.
struct SplitRows {
    int seq, head, rows, spans;
    float* partials;  // [spans, rows, accum_stride]
};

constexpr int64_t PARTIAL_FLOATS = 4 << 20;  // 16 MiB: the most that sums waiting to be merged may take

// Cuts a step into items: enough of them to keep all threads busy, spans apart where rows alone are too few. How it is
// cut changes no bits.
void plan(const AttendJob& job, int threads, std::vector<AttendItem>& items, std::vector<SplitRows>& splits) {
    const RwBatch& b = *job.batch;
    const auto first_span = [&](int s) { return (int)(oldest_page(job, s) / (SPAN / PAGE)); };
    const auto last_span = [&](int s) { return (b.kv_lengths[s] + SPAN - 1) / SPAN; };
    const auto block_of = [&](int s) { return in_tiles(job, s) ? job.prompt_block : job.row_block; };
    int64_t blocks = 0, floats = 0, left = 0;  // left: spans of blocks for which there is no item yet
    for (int s = 0; s < b.seqs; s++) {
        const int64_t rows = (int64_t)(b.query_starts[s + 1] - b.query_starts[s]) * job.share;
        const int64_t of_seq = (rows + block_of(s) - 1) / block_of(s) * job.kv_heads;
        blocks += of_seq, left += of_seq * (last_span(s) - first_span(s));
        floats += rows * job.kv_heads * last_span(s) * job.accum_stride;
    }
    const bool split = threads > 1 && blocks < 8 * threads && floats <= PARTIAL_FLOATS;
    float* partials = split ? (float*)partial_buffer.get(floats * sizeof(float)) : nullptr;
    for (int s = 0; s < b.seqs; s++) {
        const int rows = (b.query_starts[s + 1] - b.query_starts[s]) * job.share;
        const int first = first_span(s), last = last_span(s), block = block_of(s);
        const bool apart = split && last - first > 1;
        for (int head = 0; head < job.kv_heads && rows; head++) {
            for (int r = 0; r < rows; r += block)
                for (int span = first; span < last;) {
                    // neighbours in the context stay together where much is left: the next page is then fetched in time
                    const int end = apart ? (int)std::min<int64_t>(last, span + std::max<int64_t>(1, left / (2 * threads))) : last;
                    float* to = apart ? partials + ((int64_t)(span - first) * rows + r) * job.accum_stride : nullptr;
                    items.push_back({s, head, r, std::min(rows, r + block), span, end, to, (int64_t)rows * job.accum_stride});
                    left -= end - span;
                    span = end;
                }
            if (!apart) continue;
            splits.push_back({s, head, rows, last - first, partials});
            partials += (int64_t)(last - first) * rows * job.accum_stride;
        }
    }
}

void merge_split(const AttendJob& job, const Kernels& kernels, const SplitRows& split, float* scratch) {
    for (int r = 0; r < split.rows; r++)
        kernels.merge(job, split.seq, split.head, r, split.partials + (int64_t)r * job.accum_stride, split.spans,
                      (int64_t)split.rows * job.accum_stride, scratch);
}

// Below these a second thread costs more than it brings (about 2 us to wake and to meet).
constexpr int64_t QUERIES_PER_PIECE = 32, LITTLE_WORK = 24, LITTLE_MERGING = 256, APPENDS_PER_PIECE = 8;

void attend_rows(const AttendJob& job, const Kernels& kernels, int threads) {
    static thread_local std::vector<AttendItem> items;
    static thread_local std::vector<SplitRows> splits;
    items.clear();
    splits.clear();
    plan(job, threads, items, splits);
    const size_t bytes = kernels.scratch_bytes(&job);
    const auto scratch = [bytes] { return (float*)scratch_buffer.get(bytes); };
    const int64_t queries = (int64_t)job.batch->tokens * job.q_heads;
    share(threads, queries, QUERIES_PER_PIECE, [&](int64_t a, int64_t z) { kernels.prepare(job, a, z, scratch()); });
    int64_t work = 0, merges = 0;
    for (const AttendItem& i : items) work += (int64_t)(i.last_span - i.first_span) * (i.last_row - i.first_row + 2);
    for (const SplitRows& i : splits) merges += (int64_t)i.rows * i.spans;
    const AttendItem* item = items.data();
    share_out(work < LITTLE_WORK ? 1 : threads, (int64_t)items.size(), [&](int64_t a, int64_t z) {
        for (; a < z; a++) kernels.attend(job, item[a], scratch());
    });
    const SplitRows* split = splits.data();
    share(merges < LITTLE_MERGING ? 1 : threads, (int64_t)splits.size(), 1, [&](int64_t a, int64_t z) {
        for (; a < z; a++) merge_split(job, kernels, split[a], scratch());
    });
}

Refusal run_append(const AppendJob& job, int64_t arena_bytes, const Kernels& kernels, int threads) {
    if (Refusal bad = check_append(job, arena_bytes)) return bad;
    const size_t bytes = kernels.scratch_bytes(nullptr);
    share(threads, (int64_t)job.batch->tokens * job.kv_heads, APPENDS_PER_PIECE,
          [&](int64_t a, int64_t z) { kernels.append(job, a, z, (float*)scratch_buffer.get(bytes)); });
    return OK;
}

// What is derived from the layout is filled in here.
Refusal run_attend(AttendJob& job, int64_t arena_bytes, const Kernels& kernels, int threads) {
    const RwLayout* layout = first_layout(job);
    if (!layout) return OK;  // no rows
    if (!usable(*layout) || job.q_heads % layout->kv_heads) return BAD_LAYOUT;
    derive(job, *layout, kernels);
    if (Refusal bad = check_attend(job, arena_bytes)) return bad;
    const size_t rows = (size_t)job.batch->tokens * job.q_heads, codes = round_up(job.q_stride, 32);
    job.q_stride = (int)codes;
    job.q_codes = (int16_t*)query_buffer.get(rows * (codes * sizeof(int16_t) + (job.k_groups + 2) * sizeof(float)));
    job.q_terms = (float*)(job.q_codes + rows * codes);
    attend_rows(job, kernels, threads);
    return OK;
}

#include "pack.h"
#include "step.h"

}  // namespace

extern "C" {

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

API int rw_version() { return 6; }  // of this interface: native.py expects it, and refuses a library left by another

API int rw_supported(int isa) { return kernels_of(isa) != nullptr; }

API int rw_append(int isa, uint8_t* arena, int64_t arena_bytes, const RwLayout* layouts, const RwBatch* batch, const RwLayer* layer,
                  int32_t kv_heads, const void* k, int64_t k_token, int64_t k_head, int32_t k_bf16, const void* v, int64_t v_token,
                  int64_t v_head, int32_t v_bf16, int32_t threads) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return BAD_ISA;
    const AppendJob job = {arena, layouts, batch, layer, {k, k_token, k_head, k_bf16}, {v, v_token, v_head, v_bf16}, kv_heads};
    return run_append(job, arena_bytes, *kernels, threads);
}

API int rw_attend(int isa, uint8_t* arena, int64_t arena_bytes, const RwLayout* layouts, const RwBatch* batch, const RwLayer* layer,
                  int32_t q_heads, const void* q, int64_t q_token, int64_t q_head, int32_t q_bf16, void* out, int32_t threads) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return BAD_ISA;
    AttendJob job = {};
    job.arena = arena, job.layouts = layouts, job.batch = batch, job.layer = layer;
    job.q = {q, q_token, q_head, q_bf16};
    job.out = out, job.q_heads = q_heads;
    return run_attend(job, arena_bytes, *kernels, threads);
}

// Blocks of `block_bytes` of a kind of RwBlocks, one behind the other -> `block_codes` codes of each, a byte each.
API void rw_codes(int32_t kind, const uint8_t* blocks, int64_t count, int64_t block_bytes, int64_t block_codes, uint8_t* codes) {
    for (int64_t i = 0; i < count; i++) codes_of_block(kind, blocks + i * block_bytes, codes + i * block_codes);
}

// `tiles`: as many of `tile_bytes` as the outputs fill, all 0.
API void rw_pack(const RwCodes* codes, int64_t tile_bytes, uint8_t* tiles) { pack(*codes, (size_t)tile_bytes, tiles); }

API int rw_step(int isa, uint8_t* arena, int64_t arena_bytes, const RwLayout* layouts, const RwBatch* batches, const RwDense* model,
                const int32_t* tokens, const int32_t* positions, const int32_t* wanted, int32_t num_wanted, float* logits, int32_t threads) {
    const Kernels* kernels = kernels_of(isa);
    if (!kernels) return BAD_ISA;
    return Step(*model, {arena, arena_bytes, layouts, batches, tokens, positions, wanted, num_wanted, logits}, *kernels, threads).run();
}

}  // extern "C"
