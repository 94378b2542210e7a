// Attention weights x V of one page. Included once per instruction set, after kernels_scores.h.
//
// Lanes are values: two rows of codes are spread over the lanes side by side, and one 16-bit dot product with a pair of
// weights serves all lanes. A weight is p x (scale of its token), in 16-bit fixed point whose step is set by the largest
// p and the largest scale of its 64 tokens: the sums are exact integers, and no small weight drowns beside a large one
// far away.

constexpr int TILE = 4;  // vectors of V multiplied at a time

// How many values a tile holds, and which of them is in a lane: 16-bit words of codes are spread over the lanes and
// shifted, so that vector i has nibble i of every word (or byte i of every two).
inline int tile_width(const AttendJob& job) { return job.raw ? TILE * W : std::min(job.group, TILE * W); }
inline int tile_value(const AttendJob& job, int vector, int lane) {
    if (job.raw) return vector * W + lane;
    if (tile_width(job) == TILE * W) return 4 * lane + vector;
    return 4 * (lane % (W / 2)) + 2 * vector + lane / (W / 2);
}

// Two rows of tile_width values -> V vectors, lanes (value of one row, value of the other).
template <int BITS, int V> inline void unpack_pair(const uint8_t* even, const uint8_t* odd, VI (&out)[V]) {
    if constexpr (V == 2) {
        unpack_half_pair<BITS>(even, odd, out);
    } else if constexpr (BITS == 4) {
        const VI x = word_pairs(even, odd);
        UNROLL
        for (int i = 0; i < 4; i++) out[i] = (x >> (4 * i)) & splat_int(0x000F000F);
    } else if constexpr (BITS == 8) {
        const VI a = load_int(even), b = load_int(odd), low = join(a, b), high = join_high(a, b);
        UNROLL
        for (int i = 0; i < 2; i++) {
            out[i] = (low >> (8 * i)) & splat_int(0x00FF00FF);
            out[2 + i] = (high >> (8 * i)) & splat_int(0x00FF00FF);
        }
    } else {
        UNROLL
        for (int i = 0; i < 4; i++) out[i] = word_pairs(even + 2 * W * i, odd + 2 * W * i);
    }
}

template <int BITS, int V> inline void unpack_block(const uint8_t* rows, size_t stride, VI* tile) {
    for (int i = 0; i < BLOCK; i += 2, rows += 2 * stride, tile += V) {
        VI out[V];
        unpack_pair<BITS, V>(rows, rows + stride, out);
        UNROLL
        for (int v = 0; v < V; v++) tile[v] = out[v];
    }
}

// bf16 rows end where their width ends, and rows that were never written may hold anything: both read as 0 here. (Codes
// are finite whatever they are, and meet weights of 0.)
inline void unpack_block_raw(const Side& v, int at, int t, int valid, VI* tile) {
    const size_t offset = (size_t)at * 2, bytes = std::min<size_t>(2 * TILE * W, v.row_bytes - offset);
    for (int i = t; i < t + BLOCK; i += 2, tile += TILE) {
        const uint8_t *even = v.codes + i * v.row_bytes + offset, *odd = even + v.row_bytes;
        alignas(64) uint8_t copy[2][2 * TILE * W];
        if (bytes < 2 * TILE * W || i + 1 >= valid) {
            memset(copy, 0, sizeof copy);
            if (i < valid) memcpy(copy[0], even, bytes);
            if (i + 1 < valid) memcpy(copy[1], odd, bytes);
            even = copy[0], odd = copy[1];
        }
        VI out[TILE];
        unpack_pair<16, TILE>(even, odd, out);
        for (int v = 0; v < TILE; v++) tile[v] = out[v];
    }
}

inline void unpack_tile(const AttendJob& job, const Side& v, int at, int t, int valid, VI* tile) {
    if (job.raw) return unpack_block_raw(v, at, t, valid, tile);
    const uint8_t* rows = v.codes + t * v.row_bytes + (size_t)at * v.bits / 8;
    if (tile_width(job) == TILE * W)
        v.bits == 4 ? unpack_block<4, 4>(rows, v.row_bytes, tile) : unpack_block<8, 4>(rows, v.row_bytes, tile);
    else
        v.bits == 4 ? unpack_block<4, 2>(rows, v.row_bytes, tile) : unpack_block<8, 2>(rows, v.row_bytes, tile);
}

// Weights of rows for a block of tokens, and where the weighted values go.
struct WeightTile {
    const int16_t *high, *low;  // [rows, PAGE]; low only for bf16 pages
    const float* steps;         // [rows, PAGE / BLOCK]
    float* values;              // [rows, accum_stride]
};

template <int R, int V> inline void add_values(const AttendJob& job, const WeightTile& w, const VI (&sum)[R][V]) {
    UNROLL
    for (int r = 0; r < R; r++) {
        const VF step = splat(w.steps[r * (PAGE / BLOCK)]);
        UNROLL
        for (int i = 0; i < V; i++) {
            float* to = w.values + r * job.accum_stride + i * W;
            store(to, fma(to_float(sum[r][i]), step, load(to)));
        }
    }
}

template <int R, int V> inline void add_pair(const WeightTile& w, int t, const VI (&v)[V], VI (&sum)[R][V]) {
    UNROLL
    for (int r = 0; r < R; r++) {
        const VI both = splat_int(pair_at(w.high + r * PAGE + t));
        UNROLL
        for (int i = 0; i < V; i++) sum[r][i] = dot16(sum[r][i], v[i], both);
    }
}

template <int R, int V> void sum_tile(const AttendJob& job, const WeightTile& w, const VI* tile) {
    VI sum[R][V];
    clear(sum);
    for (int t = 0; t < BLOCK; t += 2, tile += V) {
        VI v[V];
        UNROLL
        for (int i = 0; i < V; i++) v[i] = tile[i];
        add_pair<R, V>(w, t, v, sum);
    }
    add_values<R, V>(job, w, sum);
}

// What is fetched while two tokens are added up.
struct Ahead {
    const uint8_t* from;
    size_t bytes;
};

// A few rows: V goes from codes to products without being stored in between.
template <int R, int BITS, int V> void sum_fused(const AttendJob& job, const WeightTile& w, const uint8_t* rows, size_t stride, Ahead ahead) {
    VI sum[R][V];
    clear(sum);
    for (int t = 0; t < BLOCK; t += 2, rows += 2 * stride) {
        VI v[V];
        prefetch(ahead.from, ahead.bytes);
        ahead.from += ahead.bytes;
        unpack_pair<BITS, V>(rows, rows + stride, v);
        add_pair<R, V>(w, t, v, sum);
    }
    add_values<R, V>(job, w, sum);
}

template <int R> void sum_tile_raw(const AttendJob& job, const WeightTile& w, const VI* tile) {
    VF sum[R][TILE];
    UNROLL
    for (int r = 0; r < R; r++)
        for (int i = 0; i < TILE; i++) sum[r][i] = splat(0);
    for (int t = 0; t < BLOCK; t += 2, tile += TILE) {
        UNROLL
        for (int r = 0; r < R; r++) {
            const VI high = splat_int(pair_at(w.high + r * PAGE + t)), low = splat_int(pair_at(w.low + r * PAGE + t));
            UNROLL
            for (int i = 0; i < TILE; i++) sum[r][i] = dot_bf16(dot_bf16(sum[r][i], tile[i], high), tile[i], low);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        for (int i = 0; i < TILE; i++) {
            float* to = w.values + r * job.accum_stride + i * W;
            store(to, fma(sum[r][i], splat(w.steps[r * (PAGE / BLOCK)]), load(to)));
        }
}

template <int R> void sum_rows(const AttendJob& job, WeightTile w, const VI* tile, int rows) {
    for (; rows >= R; rows -= R) {
        if (job.raw)
            sum_tile_raw<R>(job, w, tile);
        else
            tile_width(job) == TILE * W ? sum_tile<R, TILE>(job, w, tile) : sum_tile<R, 2>(job, w, tile);
        w.high += R * PAGE;
        w.low += R * PAGE;
        w.steps += R * (PAGE / BLOCK);
        w.values += R * job.accum_stride;
    }
    if constexpr (R > 1) {
        if (rows) sum_rows<R - 1>(job, w, tile, rows);
    }
}

template <int R> inline void sum_few(const AttendJob& job, const WeightTile& w, const Side& v, int at, int t, int rows, Ahead ahead) {
    if constexpr (R > 1) {
        if (rows < R) return sum_few<R - 1>(job, w, v, at, t, rows, ahead);
    }
    const uint8_t* codes = v.codes + t * v.row_bytes + (size_t)at * v.bits / 8;
    if (tile_width(job) == TILE * W)
        v.bits == 4 ? sum_fused<R, 4, TILE>(job, w, codes, v.row_bytes, ahead) : sum_fused<R, 8, TILE>(job, w, codes, v.row_bytes, ahead);
    else
        v.bits == 4 ? sum_fused<R, 4, 2>(job, w, codes, v.row_bytes, ahead) : sum_fused<R, 8, 2>(job, w, codes, v.row_bytes, ahead);
}
