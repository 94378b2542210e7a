// Queries x K of one page. Included once per instruction set, after kernels_append.h.
//
// Lanes are tokens: W rows of codes are transposed, so that a lane meets two values of K at a time, and one 16-bit dot
// product with a pair of query values from memory serves all lanes. Sums of a group are integers, exact in any order.

constexpr int S_STRIDE = PAGE + 16;  // a power of two would put all rows into few cache sets
constexpr int PANEL = 2 * W;         // tokens multiplied at a time where K is unpacked for many rows

inline int32_t pair_at(const void* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return pair;
}

inline void prefetch(const void* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i);
}

// Vector i of the pairs in a dword of codes: values (i, i + 4) of 8 four-bit ones, (i, i + 2) of 4 regrouped bytes.
template <int BITS> inline VI pair_of(VI dword, int i) {
    if constexpr (BITS == 16) return dword;
    return (dword >> (BITS * i)) & splat_int(BITS == 4 ? 0x000F000F : 0x00FF00FF);
}
template <int BITS> constexpr int PAIRS = BITS == 4 ? 4 : BITS == 8 ? 2 : 1;  // in a dword

// Tokens [t, t + PANEL) of K -> panel[pair][2].
template <int BITS> inline void unpack_panel(const Side& k, int t, VI* panel) {
    for (int half = 0; half < 2; half++) {
        const uint8_t* rows = k.codes + (t + half * W) * k.row_bytes;
        VI* out = panel + half;
        for (size_t at = 0; at < k.row_bytes; at += 32) {
            alignas(64) uint8_t rest[W * 32];
            const size_t bytes = std::min<size_t>(32, k.row_bytes - at);
            VI in[8];
            if (bytes < 32) {  // reading on would leave the arena behind its last row
                memset(rest, 0, sizeof rest);
                for (int i = 0; i < W; i++) memcpy(rest + 32 * i, rows + i * k.row_bytes + at, bytes);
                columns<BITS == 8>(rest, 32, in);
            } else {
                columns<BITS == 8>(rows + at, k.row_bytes, in);
            }
            UNROLL
            for (int j = 0; j < 8; j++)
                if (BITS == 16 || 4 * j < (int)bytes) {  // the panel has room for whole groups of codes, or for whole 16 plain values
                    for (int i = 0; i < PAIRS<BITS>; i++) out[2 * (PAIRS<BITS> * j + i)] = pair_of<BITS>(in[j], i);
                }
            out += 16 * PAIRS<BITS>;
        }
    }
}

// Query rows, and where their scores of some tokens go.
struct QueryTile {
    const int16_t* codes;
    const float* terms;
    float* scores;
    const float *k_scales, *k_biases;  // [groups, PAGE], from the first of those tokens on
};

// Code sums of a group -> q.k in steps of the query, added to what the groups before it gave.
template <int R, int N> inline void add_scores(const AttendJob& job, const QueryTile& q, int group, const VI (&sum)[R][N]) {
    const float *scales = q.k_scales + group * PAGE, *biases = q.k_biases + group * PAGE;
    UNROLL
    for (int r = 0; r < R; r++) {
        const VF of_bias = splat(q.terms[r * (job.k_groups + 2) + 2 + group]);
        UNROLL
        for (int n = 0; n < N; n++) {
            float* to = q.scores + r * S_STRIDE + n * W;
            const VF x = to_float(sum[r][n]), scale = load(scales + n * W);
            store(to, fma(of_bias, load(biases + n * W), group ? fma(x, scale, load(to)) : x * scale));
        }
    }
}

template <int R> void score_panel(const AttendJob& job, const QueryTile& q, const VI* panel) {
    const int pairs = job.group / 2;
    for (int g = 0; g < job.k_groups; g++, panel += 2 * pairs) {
        VI sum[R][2];
        UNROLL
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = splat_int(0);
        const int16_t* codes = q.codes + g * job.group;
        for (int j = 0; j < pairs; j++) {
            const VI k0 = panel[2 * j], k1 = panel[2 * j + 1];
            UNROLL
            for (int r = 0; r < R; r++) {
                const VI both = splat_int(pair_at(codes + r * job.q_stride + 2 * j));
                sum[r][0] = dot16(sum[r][0], k0, both);
                sum[r][1] = dot16(sum[r][1], k1, both);
            }
        }
        add_scores<R, 2>(job, q, g, sum);
    }
}

template <int R> void score_panel_raw(const AttendJob& job, const QueryTile& q, const VI* panel) {
    VF sum[R][2];
    UNROLL
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = splat(0);
    const int parts = job.q.bf16 ? 1 : 2;  // a bf16 query leaves nothing over
    for (int part = 0; part < parts; part++)
        for (int j = 0; j < job.k_padded / 2; j++) {
            const VI k0 = panel[2 * j], k1 = panel[2 * j + 1];
            UNROLL
            for (int r = 0; r < R; r++) {
                const VI both = splat_int(pair_at(q.codes + r * job.q_stride + part * job.k_padded + 2 * j));
                sum[r][0] = dot_bf16(sum[r][0], k0, both);
                sum[r][1] = dot_bf16(sum[r][1], k1, both);
            }
        }
    UNROLL
    for (int r = 0; r < R; r++)
        for (int n = 0; n < 2; n++) store(q.scores + r * S_STRIDE + n * W, sum[r][n]);
}

template <int R> void score_rows(const AttendJob& job, QueryTile q, const VI* panel, int rows) {
    for (; rows >= R; rows -= R) {
        job.raw ? score_panel_raw<R>(job, q, panel) : score_panel<R>(job, q, panel);
        q.codes += R * job.q_stride;
        q.terms += R * (job.k_groups + 2);
        q.scores += R * S_STRIDE;
    }
    if constexpr (R > 1) {
        if (rows) score_rows<R - 1>(job, q, panel, rows);
    }
}

// Vector i as pair_of gives it, but times 16 for odd i of 4-bit codes: that saves every other shift.
template <int BITS> inline VI scaled_pair_of(VI dword, int i) {
    if constexpr (BITS == 4) return (i < 2 ? dword : dword >> 8) & splat_int(i & 1 ? 0x00F000F0 : 0x000F000F);
    return pair_of<BITS>(dword, i);
}

// The queries of a few rows, [pair][row]: next to each other in the order in which they are multiplied.
struct FewQueries {
    int begin = 0, count = 0;
    alignas(64) int32_t pairs[FUSED_ROWS * MAX_DIM / 2];
    void take(const AttendJob& job, const QueryTile& q, int first, int rows) {
        if (begin == first && count == rows) return;
        begin = first, count = rows;
        for (int j = 0; j < job.k_padded / 2; j++)
            for (int r = 0; r < rows; r++) pairs[j * rows + r] = pair_at(q.codes + r * job.q_stride + 2 * j);
    }
};

// A few rows x W tokens: K goes from codes to products without being stored in between.
template <int R, int BITS> void score_fused(const AttendJob& job, const QueryTile& q, const int32_t* pairs, const uint8_t* rows, size_t stride) {
    for (int g = 0; g < job.k_groups; g++) {
        VI sum[R][2];  // of even and of odd pairs
        UNROLL
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = splat_int(0);
        for (int chunk = 0; chunk < job.group * BITS / 256; chunk++, rows += 32, pairs += R * 128 / BITS) {
            VI in[8];
            columns<BITS == 8>(rows, stride, in);
            UNROLL
            for (int j = 0; j < 8; j++) {
                UNROLL
                for (int i = 0; i < PAIRS<BITS>; i++) {
                    const VI k = scaled_pair_of<BITS>(in[j], i);
                    UNROLL
                    for (int r = 0; r < R; r++) sum[r][i & 1] = dot16(sum[r][i & 1], k, splat_int(pairs[(PAIRS<BITS> * j + i) * R + r]));
                }
            }
        }
        VI total[R][1];
        UNROLL
        for (int r = 0; r < R; r++) total[r][0] = sum[r][0] + (BITS == 4 ? sum[r][1] >> 4 : sum[r][1]);
        add_scores<R, 1>(job, q, g, total);
    }
}

template <int R> inline void score_few(const AttendJob& job, const QueryTile& q, const FewQueries& few, const Side& k, int t) {
    if constexpr (R > 1) {
        if (few.count < R) return score_few<R - 1>(job, q, few, k, t);
    }
    const uint8_t* codes = k.codes + t * k.row_bytes;
    k.bits == 4 ? score_fused<R, 4>(job, q, few.pairs, codes, k.row_bytes) : score_fused<R, 8>(job, q, few.pairs, codes, k.row_bytes);
}

inline void score_many(const AttendJob& job, const QueryTile& q, const Side& k, int t, int rows, VI* panel) {
    if (k.bits == 4) unpack_panel<4>(k, t, panel);
    if (k.bits == 8) unpack_panel<8>(k, t, panel);
    if (k.bits == 16) unpack_panel<16>(k, t, panel);
    score_rows<QK_ROWS>(job, q, panel, rows);
}
