// Products of activations with quantised weights. Included once per instruction set, after kernels_codes.h.
//
// Lanes are outputs: a tile is 16 of them, and one 16-bit dot product with a pair of activations from memory serves all
// lanes. Activations are in 16-bit fixed point with a step for each group of 32 columns, so that the sums of a group are
// exact integers; plain bfloat16 weights meet them as bfloat16 and what that leaves over. Groups are added in the order
// of the columns. Rows share the unpacking of weights and nothing else: a row's bits do not depend on how many there are.

// 2^x to 1e-7, for x in [-126, 126]
inline VF exp2_fine(VF x) {
    const VF rounded = x + splat(ROUNDING), f = x - (rounded - splat(ROUNDING));
    VF p = splat(1.5403530393381608e-4f);
    for (const float c : {1.3333558146428443e-3f, 9.618129107628477e-3f, 5.550410866482158e-2f, 2.402265069591007e-1f, 6.931471805599453e-1f, 1.f})
        p = fma(f, p, splat(c));
    return (VF)((VI)p + ((VI)rounded << 23));
}

// x times the logistic function of y
inline VF gated(VF x, VF y) { return x / (splat(1) + exp2_fine(min(max(y * splat(-LOG2_E), splat(-126)), splat(126)))); }
inline VF silu(VF x) { return gated(x, x); }
// GELU by its tanh approximation (arXiv 1606.08415): (1 + tanh y) / 2 is the logistic function of 2 y
inline VF gelu_tanh(VF x) { return gated(x, x * fma(x * x, splat(1.5957691216057308f * 0.044715f), splat(1.5957691216057308f))); }

// Where a row of a block stands: blocks have LINEAR_ROWS rows, the last one what is left.
struct Place {
    int block_rows, row;
    int64_t first;  // of the block
};
inline int block_rows(const Inputs& in) { return in.kinds & TILED_INPUTS ? TILED_ROWS : LINEAR_ROWS; }
inline Place place_of(const Inputs& in, int64_t row) {
    const int64_t first = row / block_rows(in) * block_rows(in);
    return {in.kinds & TILED_INPUTS ? TILED_ROWS : (int)std::min<int64_t>(LINEAR_ROWS, in.rows - first), (int)(row - first), first};
}

// Column i of a group and the one it is paired with: of every 8 columns (0,4) (1,5) (2,6) (3,7).
inline int paired(int pair) { return pair / 4 * 8 + pair % 4; }

// 32 activations of one row -> pairs for every kind of weights that will meet them.
inline void put_group(const Inputs& in, const Place& at, int group, const float* x) {
    const int64_t base = (at.first * in.columns + (int64_t)group * COLUMNS * at.block_rows) / 2 + at.row;
    if (in.kinds & FIXED_INPUTS) {
        VI top = splat_int(0), sum = splat_int(0);
        for (int i = 0; i < COLUMNS; i += W) top = max_int(top, (VI)load(x + i) & splat_int(0x7FFFFFFF));
        const float step = fmaxf(max_lane((VF)top), 1e-25f) / 32767;
        const VF per = splat(1 / step);
        alignas(64) int16_t whole[COLUMNS];
        for (int i = 0; i < COLUMNS; i += W) {
            const VI q = round_int(load(x + i) * per);
            store_i16(whole + i, q);
            sum = sum + q;
        }
        for (int p = 0; p < COLUMNS / 2; p++)
            in.pairs[base + (int64_t)p * at.block_rows] = (uint16_t)whole[paired(p)] | (uint32_t)(uint16_t)whole[paired(p) + 4] << 16;
        const int64_t term = at.first * (in.columns / COLUMNS) + (int64_t)group * at.block_rows + at.row;
        in.steps[term] = step;
        in.sums[term] = step * sum_lanes(to_float(sum));
    }
    if (in.kinds & PLAIN_INPUTS) {
        uint16_t high[COLUMNS], low[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) {
            high[i] = to_bf16(x[i]);
            low[i] = to_bf16(x[i] - from_bf16(high[i]));
        }
        for (int p = 0; p < COLUMNS / 2; p++) {
            const int64_t to = base + (int64_t)p * at.block_rows;
            in.high[to] = high[paired(p)] | (uint32_t)high[paired(p) + 4] << 16;
            in.low[to] = low[paired(p)] | (uint32_t)low[paired(p) + 4] << 16;
        }
    }
#if defined(REWAKE_TILES)
    if (in.kinds & TILED_INPUTS) store_paired_bf16(in.high + base - at.row + at.row * GROUP_PAIRS, load(x), load(x + W));
#endif
}

inline float root_mean_square(const float* x, int n, float eps) {
    VF sum = splat(0);
    for (int i = 0; i < n; i += W) sum = fma(load(x + i), load(x + i), sum);
    return sqrtf(sum_lanes(sum) / n + eps);
}

// Groups [first, last) of a row of x, normalised if there is a norm.
inline void prepare_row(const Inputs& in, int64_t row, const float* x, const float* norm, float eps, int first, int last) {
    const float* from = x + (in.places ? in.places[row] : row) * in.columns;
    const Place at = place_of(in, row);
    const VF by = splat(norm ? 1 / root_mean_square(from, in.columns, eps) : 1);
    for (int g = first; g < last; g++) {
        alignas(64) float group[COLUMNS];
        for (int i = 0; i < COLUMNS; i += W) {
            const int c = g * COLUMNS + i;
            const VF scaled = load(from + c) * by;
            store(group + i, norm ? scaled * load(norm + c) : scaled);
        }
        put_group(in, at, g, group);
    }
}

// Inputs [first, last): groups of all rows of a block, block by block. Rows of a group share cache lines, so they are not shared out.
void prepare_inputs(const Inputs& in, const float* x, const float* norm, float eps, int64_t first, int64_t last) {
    const int groups = in.columns / COLUMNS;
    for (int64_t begin = first, end; begin < last; begin = end) {
        const int64_t block = begin / groups * block_rows(in), next = (begin / groups + 1) * groups;
        end = std::min(last, next);
        for (int64_t row = block; row < std::min(in.rows, block + block_rows(in)); row++)
            prepare_row(in, row, x, norm, eps, (int)(begin % groups), groups - (int)(next - end));
    }
}

// How many groups there are of all blocks.
int64_t input_groups(const Inputs& in) { return (in.rows + block_rows(in) - 1) / block_rows(in) * (in.columns / COLUMNS); }

template <int R> inline void multiply_block(const RwLinear& w, int64_t tile, const Inputs& in, int64_t first, int rows, float* y) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_block<R - 1>(w, tile, in, first, rows, y);
    }
    if (w.kind == PLAIN) return multiply_plain<R>(w, tile, in, first, y);
    on_tile(w, tile, [&](auto of) { multiply_rows<R>(of, in, first, y); });
}

inline void add_bias(const RwLinear& w, int64_t tile, int rows, float* y) {
    if (!w.bias) return;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < OUTPUT_TILE; i += W) store(y + r * OUTPUT_TILE + i, load(y + r * OUTPUT_TILE + i) + load(w.bias + tile * OUTPUT_TILE + i));
}

// y[rows][16] of one tile and one block of rows, bias included.
inline void multiply_tile(const RwLinear& w, int64_t tile, const Inputs& in, int64_t first, int rows, float* y) {
    multiply_block<LINEAR_ROWS>(w, tile, in, first, rows, y);
    add_bias(w, tile, rows, y);
}

// Blocks of rows that stay in the cache while weights pass by.
template <class Act> inline void each_block(const Inputs& in, int64_t begin, int64_t end, Act act) {
    for (int64_t first = begin; first < end; first += LINEAR_ROWS) act(first, (int)std::min<int64_t>(LINEAR_ROWS, in.rows - first));
}

// y[rows][16] of a tile and inputs from `first` on, put to out[row][output], or added to what is there.
inline void put_rows(const RwLinear& w, int64_t tile, const float* y, const Inputs& in, int64_t first, int rows, float* out, int64_t stride, bool add) {
    const int count = (int)std::min<int64_t>(OUTPUT_TILE, w.outputs - tile * OUTPUT_TILE);
    for (int64_t r = first; r < first + rows; r++, y += OUTPUT_TILE) {
        float* to = out + (in.places ? in.places[r] : r) * stride + tile * OUTPUT_TILE;
        if (count == OUTPUT_TILE)
            for (int i = 0; i < OUTPUT_TILE; i += W) store(to + i, add ? load(to + i) + load(y + i) : load(y + i));
        else
            for (int i = 0; i < count; i++) to[i] = add ? to[i] + y[i] : y[i];
    }
}

// Tiles [first, last) for all rows.
void multiply(const RwLinear& w, const Inputs& in, float* out, int64_t stride, bool add, int64_t first, int64_t last) {
    for (int64_t begin = 0; begin < in.rows; begin += ROW_PANEL)
        for (int64_t tile = first; tile < last; tile++)
            each_block(in, begin, std::min(in.rows, begin + ROW_PANEL), [&](int64_t row, int rows) {
                alignas(64) float y[LINEAR_ROWS * OUTPUT_TILE];
                multiply_tile(w, tile, in, row, rows, y);
                put_rows(w, tile, y, in, row, rows, out, stride, add);
            });
}

inline VF activate(int kind, VF x) { return kind == SILU ? silu(x) : gelu_tanh(x); }

// activation(gate) * up of a row and a group, from tiles of both: row r of those, `row` of what follows.
template <int N> inline void put_gated(const GatedJob& job, const float (&gate)[2][N], const float (&up)[2][N], int64_t r, int64_t row, int group) {
    alignas(64) float x[COLUMNS];
    for (int c = 0; c < COLUMNS; c += W) {
        const int64_t at = r * OUTPUT_TILE + c % OUTPUT_TILE;
        const int t = c / OUTPUT_TILE;
        store(x + c, activate(job.activation, load(gate[t] + at)) * load(up[t] + at));
    }
    put_group(job.out, place_of(job.out, row), group, x);
}

// Groups [first, last) for all rows.
void multiply_gated(const GatedJob& job, int64_t first, int64_t last) {
    constexpr int TILES = COLUMNS / OUTPUT_TILE;
    const Inputs& in = job.in;
    for (int64_t begin = 0; begin < in.rows; begin += ROW_PANEL)
        for (int64_t group = first; group < last; group++)
            each_block(in, begin, std::min(in.rows, begin + ROW_PANEL), [&](int64_t row, int rows) {
                alignas(64) float g[TILES][LINEAR_ROWS * OUTPUT_TILE], u[TILES][LINEAR_ROWS * OUTPUT_TILE];
                for (int t = 0; t < TILES; t++) {
                    multiply_tile(job.gate, group * TILES + t, in, row, rows, g[t]);
                    multiply_tile(job.up, group * TILES + t, in, row, rows, u[t]);
                }
                for (int r = 0; r < rows; r++) put_gated(job, g, u, r, row + r, (int)group);
            });
}

// Rows of an embedding, scaled: one output of the weights for each token.
void embed(const RwLinear& w, const int32_t* tokens, float scale, float* x, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int pair = 0; pair < w.inputs / 2; pair++) {
            const Pair of = pair_at_output(w, tokens[t], pair);
            float* to = x + t * w.inputs + paired(pair);
            to[0] = of.first * scale, to[4] = of.second * scale;
        }
}

// RMSNorm of a head (if there is a norm), then its rotation by position: halves of it are the coordinates of d/2 planes.
void turn_heads(const HeadsJob& job, int64_t first, int64_t last) {
    const int half = job.dim / 2;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = i / job.heads;
        float* x = job.x + token * job.stride + i % job.heads * job.dim;
        if (job.norm) {
            const VF by = splat(1 / root_mean_square(x, job.dim, job.eps));
            for (int d = 0; d < job.dim; d += W) store(x + d, load(x + d) * by * load(job.norm + d));
        }
        const float *cosine = job.turns + token * job.dim, *sine = cosine + half;
        for (int d = 0; d < half; d += W) {
            const VF a = load(x + d), b = load(x + half + d), c = load(cosine + d), s = load(sine + d);
            store(x + d, a * c - b * s);
            store(x + half + d, b * c + a * s);
        }
    }
}

// x += RMSNorm of y, for rows [first, last).
void add_normed(float* x, const float* y, const float* norm, float eps, int columns, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        const float* from = y + r * columns;
        float* to = x + r * columns;
        const VF by = splat(1 / root_mean_square(from, columns, eps));
        for (int i = 0; i < columns; i += W) store(to + i, fma(load(from + i) * by, load(norm + i), load(to + i)));
    }
}

// cap * tanh(x / cap) of values [first, last).
void cap_values(float* x, float cap, int64_t first, int64_t last) {
    const auto capped = [cap](VF v) { return splat(cap) * (gated(splat(2), v * splat(2 / cap)) - splat(1)); };
    for (; first + W <= last; first += W) store(x + first, capped(load(x + first)));
    if (first == last) return;
    float rest[W] = {};
    memcpy(rest, x + first, (last - first) * sizeof(float));
    store(rest, capped(load(rest)));
    memcpy(x + first, rest, (last - first) * sizeof(float));
}

constexpr LinearKernels linear_kernels = {input_groups, prepare_inputs, multiply, multiply_gated, embed, turn_heads, add_normed, cap_values, false};
