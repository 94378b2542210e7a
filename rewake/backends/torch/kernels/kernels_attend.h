// Attention of a block of query rows to the pages of a sequence. Included once per instruction set, last.
//
// Page sums merge into span sums, those into the row's result, always in the order of the context. No row's arithmetic
// depends on the rows beside it, so rows may be grouped at will: a row's bits are the same alone, in a batch and under any
// number of threads, and in a prompt, unless tile registers take it (kernels_attend_tiles.h). Online softmax over splits as in
// FlashAttention and Flash-Decoding (arXiv 2205.14135, 2311.01282).

constexpr float LOG2E = 1.44269504088896341f;
constexpr float MASKED = -1e34f;  // times any step a query may have it is finite, and 2^x of it 0

constexpr int RUN = 8, BLOCKS = PAGE / BLOCK;

// The tokens of a page that a row sees, [low, high), and the whole blocks around them, [begin, end).
struct Extent {
    int low, high, begin, end;
};

// A few rows of a page, on their way from scores to weights.
struct Run {
    int first, count;
    Extent extents[RUN];
    float factors[RUN], tops[RUN * BLOCKS], shares[RUN * BLOCKS];
};

struct Scratch {
    float *scores, *steps, *k_scales, *k_biases, *v_scales, *v_biases, *v_factors, *v_steps, *page_sums, *span_sums, *row_sums, *row;
    int16_t *weights, *weights_low;
    uint8_t *k_refined, *v_refined;  // codes and residuals of a page, as codes of 8 bits
    uint8_t *queries, *keys, *values, *extras;  // for tile registers
    float *query_sums, *query_offsets, *extra_sums, *tops;
    VI *panel, *tile;
    Run* runs;
};

// Tiles of what weights are multiplied with beside values: a column of 1, and two for each group of V.
inline int extra_tiles(const AttendJob& job) { return (1 + 2 * job.v_groups + OUTPUT_TILE - 1) / OUTPUT_TILE; }

inline size_t lay_out(const AttendJob& job, float* base, Scratch& s) {
    size_t used = 0;
    const auto take = [&](auto*& p, size_t count) {
        p = (std::remove_reference_t<decltype(p)>)((char*)base + used);
        used += (count * sizeof(*p) + 63) / 64 * 64;
    };
    const size_t rows = job.row_block, sums = rows * job.accum_stride, item_sums = std::max(job.row_block, job.prompt_block) * job.accum_stride;
    take(s.scores, rows * S_STRIDE);
    take(s.steps, rows * BLOCKS);
    take(s.weights, rows * PAGE);
    take(s.weights_low, job.raw ? rows * PAGE : 0);
    take(s.k_scales, (size_t)job.k_groups * PAGE);
    take(s.k_biases, (size_t)job.k_groups * PAGE);
    take(s.v_scales, (size_t)job.v_groups * PAGE);
    take(s.v_biases, (size_t)job.v_groups * PAGE);
    take(s.v_factors, (size_t)job.v_groups * PAGE);
    take(s.v_steps, (size_t)job.v_groups * BLOCKS);
    take(s.runs, (rows + RUN - 1) / RUN);
    take(s.page_sums, sums);
    take(s.span_sums, item_sums);
    take(s.row_sums, item_sums);
    take(s.row, MAX_DIM + 64);
    take(s.k_refined, job.residuals ? (size_t)PAGE * job.k_padded : 0);
    take(s.v_refined, job.residuals && !job.layer->k_prefix ? (size_t)PAGE * job.v_groups * job.group : 0);
    if (job.prompt_block) {
        const size_t prompt_rows = job.prompt_block + TILED_ROWS, extra = extra_tiles(job) * OUTPUT_TILE;
        take(s.queries, prompt_rows * job.k_padded * 2);
        take(s.query_sums, prompt_rows * job.k_groups);
        take(s.query_offsets, prompt_rows);
        take(s.keys, (size_t)PAGE * job.k_padded * 2);
        take(s.values, (size_t)PAGE * job.v_groups * job.group * 2);
        take(s.extras, PAGE * extra * 2);
        take(s.extra_sums, TILED_ROWS * extra);
        take(s.tops, TILED_ROWS);
    }
    take(s.panel, job.k_padded);
    take(s.tile, TILE * BLOCK / 2);
    if (job.layer->k_prefix) s.v_scales = s.k_scales, s.v_biases = s.k_biases;
    return used;
}

size_t scratch_bytes(const AttendJob* job) {
    Scratch s;
    return job ? lay_out(*job, nullptr, s) : (MAX_DIM + 64) * sizeof(float);
}

// A block of rows, and which tokens it sees. Row r stands at token `first + r / share` of the sequence.
struct Rows {
    int begin, end;
    int64_t first;
    int share, window;
    int count() const { return end - begin; }
    int64_t position(int r) const { return first + r / share; }
    int64_t oldest(int r) const { return window ? std::max<int64_t>(0, position(r) - window + 1) : 0; }
    // The rows to which any of tokens [a, b) is visible.
    Rows seeing(int64_t a, int64_t b) const {
        Rows rows = *this;
        rows.begin = (int)std::max<int64_t>(begin, (a - first) * share);
        if (window) rows.end = (int)std::min<int64_t>(end, (b + window - 1 - first) * share);
        return rows;
    }
};

struct Page {
    Side k, v;
    int64_t base;  // its first token
    int valid;     // tokens it holds; rows behind them may hold anything
    bool refined;  // its codes have 8 bits, of which the scales know 4
};

inline Page open_page(const AttendJob& job, const AttendItem& item, int64_t page) {
    const RwBatch& b = *job.batch;
    const int64_t entry = (int64_t)item.seq * b.max_pages + page;
    const RwLayout& l = job.layouts[b.page_codecs[entry]];
    const uint8_t* layer = job.arena + b.block_table[entry] + job.layer->layer * l.layer_bytes;
    const Side k = side_of(layer, l, item.head, false);
    const int valid = (int)std::min<int64_t>(PAGE, b.kv_lengths[item.seq] - page * PAGE);
    return {k, job.layer->k_prefix ? k : side_of(layer, l, item.head, true), page * PAGE, valid, false};
}

// Codes and residuals, 4 bits each -> codes of 8 bits.
inline void refine(Side& side, const uint8_t* residuals, int rows, uint8_t* out) {
    const uint8_t* codes = side.codes;
    for (size_t i = 0; i < rows * side.row_bytes; i++) {
        const int q = codes[i], r = residuals[i];
        out[2 * i] = (uint8_t)((q << 4) | (r & 15));
        out[2 * i + 1] = (uint8_t)((q & 0xF0) | (r >> 4));
    }
    side.codes = out, side.bits = 8, side.row_bytes *= 2;
}

// The page as its queries see it while it is young.
inline Page refined(const AttendJob& job, const Scratch& s, const AttendItem& item, Page page) {
    const RwBatch& b = *job.batch;
    const int64_t entry = (int64_t)item.seq * b.max_pages + page.base / PAGE;
    const RwLayout& l = job.layouts[b.page_codecs[entry]];
    const auto residuals = [&](const Side& side, bool v) {
        return residuals_of(job.arena, b.residuals, entry, l, job.layer->layer, side, item.head, v);
    };
    refine(page.k, residuals(page.k, false), page.valid, s.k_refined);
    if (job.layer->k_prefix)
        page.v = page.k;
    else
        refine(page.v, residuals(page.v, true), page.valid, s.v_refined);
    page.refined = true;
    return page;
}

// [PAGE, groups] bf16 -> [groups, PAGE] float; tokens from `valid` on count as 0.
inline void spread_terms(const uint16_t* in, int groups, int valid, float* out) {
    if (groups == 1) {
        for (int t = 0; t < valid; t += W) store(out + t, load_bf16(in + t));
    } else if (groups == 2) {
        for (int t = 0; t < valid; t += W) {
            const VI both = load_int(in + 2 * t);
            store(out + t, (VF)(both << 16));
            store(out + PAGE + t, (VF)(both & splat_int(0xFFFF0000)));
        }
    } else {
        for (int t = 0; t < valid; t++)
            for (int g = 0; g < groups; g++) out[g * PAGE + t] = from_bf16(in[t * groups + g]);
    }
    for (int g = 0; g < groups; g++) memset(out + g * PAGE + valid, 0, (PAGE - valid) * sizeof(float));
}

// Scales of a block of V -> multiples of a step, at most 32767: p <= 1 times that is a 16-bit weight. Returns the step.
inline float normalise(const float* scales, float* out) {
    VI largest = splat_int(0);  // magnitudes compare as integers do
    for (int t = 0; t < BLOCK; t += W) largest = max_int(largest, (VI)load(scales + t) & splat_int(0x7FFFFFFF));
    const float top = max_lane((VF)largest), per = top > 1e-30f ? 32767 / top : 0;
    for (int t = 0; t < BLOCK; t += W) store(out + t, load(scales + t) * splat(per));
    return top * (1.f / 32767);
}

// Scales and biases of 4-bit codes -> of what they are with their residuals: each stands for the middle of a 16th of a step.
inline void refine_terms(float* scales, float* biases, int count) {
    for (int i = 0; i < count; i += W) {
        const VF scale = load(scales + i);
        store(biases + i, load(biases + i) - scale * splat(0.46875f));
        store(scales + i, scale * splat(0.0625f));
    }
}

inline void spread_page(const AttendJob& job, const Scratch& s, const Page& page) {
    const Side& v = page.v;
    spread_terms(page.k.scales, page.k.groups, page.valid, s.k_scales);
    spread_terms(page.k.biases, page.k.groups, page.valid, s.k_biases);
    if (!job.layer->k_prefix) {
        spread_terms(v.scales, v.groups, page.valid, s.v_scales);
        spread_terms(v.biases, v.groups, page.valid, s.v_biases);
    }
    if (page.refined) {
        refine_terms(s.k_scales, s.k_biases, page.k.groups * PAGE);
        if (!job.layer->k_prefix) refine_terms(s.v_scales, s.v_biases, v.groups * PAGE);
    }
}

// ---- scores ----

// Where the prepared queries of an item's sequence and head begin.
inline int64_t first_query(const AttendJob& job, const AttendItem& item) {
    return ((int64_t)item.head * job.batch->tokens + job.batch->query_starts[item.seq]) * job.share;
}

// Where the scores of rows [first, ...) and tokens [t, ...) of a page go, and what they are made of.
inline QueryTile query_tile(const AttendJob& job, const Scratch& s, const AttendItem& item, const Rows& rows, int first, int t) {
    const int64_t q = first_query(job, item) + first;
    return {job.q_codes + q * job.q_stride, job.q_terms + q * (job.k_groups + 2), s.scores + (first - rows.begin) * S_STRIDE + t, s.k_scales + t,
            s.k_biases + t};
}

inline void prefetch_terms(const Side& side, int first, int count) {
    prefetch(side.scales + first * side.groups, count * side.groups * sizeof(uint16_t));
    prefetch(side.biases + first * side.groups, count * side.groups * sizeof(uint16_t));
}

inline void score_page(const AttendJob& job, const Scratch& s, const AttendItem& item, const Page& page, const Page* next, const Rows& rows) {
    const bool few = !job.raw && rows.count() <= FUSED_ROWS && job.group * page.k.bits % 256 == 0;
    const int step = few ? W : PANEL;
    FewQueries queries;
    for (int t = 0; t < page.valid; t += step) {
        prefetch(page.v.codes + t * page.v.row_bytes, step * page.v.row_bytes);
        if (next && !job.raw) prefetch_terms(next->k, t, step), prefetch_terms(next->v, t, step);
        const Rows seeing = rows.seeing(page.base + t, page.base + std::min(t + step, page.valid));
        if (seeing.count() <= 0) continue;
        const QueryTile tile = query_tile(job, s, item, rows, seeing.begin, t);
        if (few) {
            queries.take(job, tile, seeing.begin, seeing.count());
            score_few<FUSED_ROWS>(job, tile, queries, page.k, t);
        } else {
            score_many(job, tile, page.k, t, seeing.count(), s.panel);
        }
    }
}

// A row's scores are logits to base 2 once multiplied by `factor` and moved by `offset`.
struct Logits {
    float factor, offset;
};

inline Logits logits_of(const AttendJob& job, const float* terms) {
    const float scale = job.layer->scale * LOG2E;
    return job.raw ? Logits{scale, 0} : Logits{terms[0] * scale, terms[1] * scale};
}

// scores -> capped logits to base 2
inline Logits soft_cap(float* s, int n, float cap, Logits l) {
    const VF factor = splat(l.factor * 2 / cap), offset = splat(l.offset * 2 / cap);
    for (int t = 0; t < n; t += W) {  // cap * tanh(x) = cap * (1 - 2 / (1 + e^2x))
        const VF e = exp2(min(fma(load(s + t), factor, offset), splat(120)));
        store(s + t, splat(cap * LOG2E) * (splat(1) - splat(2) / (splat(1) + e)));
    }
    return {1, 0};
}

inline Extent extent(const Page& page, const Rows& rows, int r) {
    const int64_t low = std::max<int64_t>(0, rows.oldest(r) - page.base), high = std::min<int64_t>(page.valid, rows.position(r) + 1 - page.base);
    return {(int)low, (int)high, (int)(low / BLOCK * BLOCK), (int)((high + BLOCK - 1) / BLOCK * BLOCK)};
}

inline void mask(float* s, Extent e) {
    for (int t = e.begin; t < e.low; t++) s[t] = MASKED;
    for (int t = e.high; t < e.end; t++) s[t] = MASKED;
}

// ---- softmax over the page, and weights from it ----
//
// Each block of a row has its own softmax: p is relative to the block's largest logit, `share` brings it to the page's.
// A few rows at a time go through each step together: within one row every step waits for the one before.

inline void find_tops(const AttendJob& job, const Scratch& s, const Page& page, const Rows& rows, const float* terms, Run& run) {
    for (int i = 0; i < run.count; i++) {
        const size_t r = run.first + i;
        float *scores = s.scores + r * S_STRIDE, *tops = run.tops + i * BLOCKS, *sums = s.page_sums + r * job.accum_stride;
        const Extent e = run.extents[i] = extent(page, rows, rows.begin + (int)r);
        Logits l = logits_of(job, terms + r * (job.k_groups + 2));
        if (job.layer->soft_cap > 0) l = soft_cap(scores + e.begin, e.end - e.begin, job.layer->soft_cap, l);
        mask(scores, e);
        VF largest[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) {
            largest[b] = splat(MASKED);
            if (b * BLOCK < e.begin || b * BLOCK >= e.end) continue;
            UNROLL
            for (int n = 0; n < BLOCK / W; n++) largest[b] = max(largest[b], load(scores + b * BLOCK + n * W));
        }
        max_lanes(largest, tops);
        for (int b = 0; b < BLOCKS; b++) tops[b] *= l.factor;
        const float top = std::max(std::max(tops[0], tops[1]), std::max(tops[2], tops[3]));
        for (int b = 0; b < BLOCKS; b++) run.shares[i * BLOCKS + b] = tops[b] - top;
        run.factors[i] = l.factor;
        sums[0] = top + l.offset;
    }
    for (int i = 0; i < run.count * BLOCKS; i += W) store(run.shares + i, exp2(load(run.shares + i)));
}

struct RowSums {
    float p, bias;  // of p, of p x (bias of its token)
};

// Scores -> p, and p x scale of one group -> 16-bit weights. Only the first group finds scores, the others p.
template <bool FIRST, bool KEEP>
inline RowSums weigh_row(float* p, int16_t* weights, float factor, const float* tops, const float* shares, const float* factors,
                         const float* edge, const float* biases, Extent e) {
    VF biased = splat(0), total = splat(0);
    for (int b = e.begin; b < e.end; b += BLOCK) {
        const VF top = splat(-tops[b / BLOCK]), share = splat(shares[b / BLOCK]);
        const float* times = b + BLOCK > e.high ? edge : factors + b;
        VF sum = splat(0), bias = splat(0);
        UNROLL
        for (int i = 0; i < BLOCK / W; i++) {
            const int t = b + i * W;
            VF y = load(p + t);
            if constexpr (FIRST) {
                y = exp2(fma(y, splat(factor), top));
                sum = sum + y;
                if constexpr (KEEP) store(p + t, y);
            }
            bias = fma(y, load(biases + t), bias);
            store_i16(weights + t, round_int(y * load(times + i * W)));
        }
        if constexpr (FIRST) total = fma(sum, share, total);
        biased = fma(bias, share, biased);
    }
    return {FIRST ? sum_lanes(total) : 0, sum_lanes(biased)};
}

// The block in which a row stands: what comes after the row must not change its weights' step.
inline float normalise_edge(const float* scales, int seen, float* out) {
    alignas(64) float own[BLOCK] = {};
    memcpy(own, scales, seen * sizeof(float));
    return normalise(own, out);
}

inline void weigh_coded(const AttendJob& job, const Scratch& s, int group, const Run& run) {
    const float *factors = s.v_factors + group * PAGE, *biases = s.v_biases + group * PAGE;
    for (int i = 0; i < run.count; i++) {
        const size_t r = run.first + i;
        float *p = s.scores + r * S_STRIDE, *sums = s.page_sums + r * job.accum_stride;
        const float *tops = run.tops + i * BLOCKS, *shares = run.shares + i * BLOCKS;
        int16_t* weights = s.weights + r * PAGE;
        const Extent e = run.extents[i];
        alignas(64) float edge[BLOCK];
        const float edge_step = e.high < e.end ? normalise_edge(s.v_scales + group * PAGE + e.end - BLOCK, e.high - (e.end - BLOCK), edge) : 0;
        RowSums row;
        if (group)
            row = weigh_row<false, false>(p, weights, 0, tops, shares, factors, edge, biases, e);
        else if (job.v_groups > 1)
            row = weigh_row<true, true>(p, weights, run.factors[i], tops, shares, factors, edge, biases, e);
        else
            row = weigh_row<true, false>(p, weights, run.factors[i], tops, shares, factors, edge, biases, e);
        if (!group) sums[1] = row.p;
        for (int b = 0; b < BLOCKS; b++) s.steps[r * BLOCKS + b] = shares[b] * s.v_steps[group * BLOCKS + b];
        if (e.high < e.end) s.steps[r * BLOCKS + e.end / BLOCK - 1] = shares[e.end / BLOCK - 1] * edge_step;
        for (int d = 0; d < job.group; d += W) store(sums + ACCUM_HEAD + group * job.group + d, splat(row.bias));
    }
}

inline void weigh_raw(const AttendJob& job, const Scratch& s, const Run& run) {
    for (int i = 0; i < run.count; i++) {
        const size_t r = run.first + i;
        const Extent e = run.extents[i];
        float *scores = s.scores + r * S_STRIDE, *sums = s.page_sums + r * job.accum_stride;
        VF total = splat(0);
        for (int t = e.begin; t < e.end; t += W) {
            const VF p = exp2(fma(load(scores + t), splat(run.factors[i]), splat(-run.tops[i * BLOCKS + t / BLOCK])));
            const VI bits = to_bf16(p);
            store_words(s.weights + r * PAGE + t, bits);
            store_words(s.weights_low + r * PAGE + t, to_bf16(p - (VF)(bits << 16)));
            total = fma(p, splat(run.shares[i * BLOCKS + t / BLOCK]), total);
        }
        sums[1] = sum_lanes(total);
        memset(sums + ACCUM_HEAD, 0, (job.accum_stride - ACCUM_HEAD) * sizeof(float));
        memcpy(s.steps + r * BLOCKS, run.shares + i * BLOCKS, BLOCKS * sizeof(float));
    }
}

// Weights of all rows for one group of V; the page's sums begin with what the biases add to every value of the group.
inline void weigh_rows(const AttendJob& job, const Scratch& s, const Page& page, const Rows& rows, const float* terms, int group) {
    for (int first = 0; first < rows.count(); first += RUN) {
        Run& run = s.runs[first / RUN];
        if (group == 0) {
            run.first = first, run.count = std::min(RUN, rows.count() - first);
            find_tops(job, s, page, rows, terms, run);
        }
        job.raw ? weigh_raw(job, s, run) : weigh_coded(job, s, group, run);
    }
}

// ---- values ----

inline void sum_page(const AttendJob& job, const Scratch& s, const Page& page, const Page* next, const Rows& rows, const float* terms) {
    const int width = tile_width(job);
    const bool few = !job.raw && rows.count() <= FUSED_ROWS;
    for (int b = 0; b < job.v_groups * BLOCKS; b++) s.v_steps[b] = normalise(s.v_scales + b * BLOCK, s.v_factors + b * BLOCK);
    for (int at = 0; at < job.v_width; at += width) {
        if (job.raw ? at == 0 : at % job.group == 0) weigh_rows(job, s, page, rows, terms, job.raw ? 0 : at / job.group);
        for (int t = 0; t < page.valid; t += BLOCK) {
            const Ahead ahead = next && at == 0 ? Ahead{next->k.codes + t * next->k.row_bytes, 2 * next->k.row_bytes} : Ahead{};
            if (!few) prefetch(ahead.from, BLOCK / 2 * ahead.bytes);
            const Rows seeing = rows.seeing(page.base + t, page.base + std::min(t + BLOCK, page.valid));
            if (seeing.count() <= 0) continue;
            const size_t i = seeing.begin - rows.begin;
            const WeightTile w = {s.weights + i * PAGE + t, s.weights_low + i * PAGE + t, s.steps + i * BLOCKS + t / BLOCK,
                                  s.page_sums + i * job.accum_stride + ACCUM_HEAD + at};
            if (few) {
                sum_few<FUSED_ROWS>(job, w, page.v, at, t, seeing.count(), ahead);
            } else {
                unpack_tile(job, page.v, at, t, page.valid, s.tile);
                sum_rows<PV_ROWS>(job, w, s.tile, seeing.count());
            }
        }
    }
}

// ---- sums of pages, spans and rows ----

// Adds the sums of later tokens to those of earlier ones.
inline void merge_rows(const AttendJob& job, float* to, const float* from, int rows) {
    const size_t bytes = job.accum_stride * sizeof(float);
    for (int first = 0; first < rows; first += W) {
        const int count = std::min(W, rows - first);
        float a[W] = {}, b[W] = {};  // maxima, then what the sums count for
        for (int i = 0; i < count; i++) {
            const float x = to[i * (size_t)job.accum_stride], y = from[i * (size_t)job.accum_stride], top = x > y ? x : y;
            a[i] = x - top, b[i] = y - top;
        }
        store(a, exp2(load(a)));
        store(b, exp2(load(b)));
        for (int i = 0; i < count; i++, to += job.accum_stride, from += job.accum_stride) {
            if (from[1] == 0) continue;  // saw nothing
            if (to[1] == 0) {
                memcpy(to, from, bytes);
                continue;
            }
            to[0] = to[0] > from[0] ? to[0] : from[0];
            to[1] = to[1] * a[i] + from[1] * b[i];
            const VF x = splat(a[i]), y = splat(b[i]);
            for (int d = ACCUM_HEAD; d < job.accum_stride; d += W) store(to + d, fma(load(to + d), x, load(from + d) * y));
        }
    }
}

inline void clear_sums(const AttendJob& job, float* sums, int rows) {
    for (int r = 0; r < rows; r++) sums[(size_t)r * job.accum_stride + 1] = 0;
}

// How an item's rows meet a page: here in products of words. `sums` are those of row `begin` and the rows behind it.
struct Words {
    const AttendJob& job;
    const Scratch& s;
    const AttendItem& item;
    void attend(const Page& page, const Page* next, const Rows& rows, int begin, float* sums) const {
        if (!job.raw) spread_page(job, s, page);
        score_page(job, s, item, page, next, rows);
        sum_page(job, s, page, next, rows, job.q_terms + (first_query(job, item) + rows.begin) * (job.k_groups + 2));
        merge_rows(job, sums + (size_t)(rows.begin - begin) * job.accum_stride, s.page_sums, rows.count());
    }
};

// The first of some rows that sees a page without its residuals.
inline int first_settled(const AttendJob& job, const Rows& rows, int64_t page) {
    if (!job.residuals) return rows.begin;
    if (page == 0) return rows.end;
    const int64_t row = ((page + 1) * PAGE + YOUNG - rows.first) * rows.share;
    return (int)std::min<int64_t>(std::max<int64_t>(row, rows.begin), rows.end);
}

inline void write_row(const AttendJob& job, int64_t token, int q_head, const float* x) {
    const int64_t at = (token * job.q_heads + q_head) * job.v_dim;
    if (!job.q.bf16) {
        memcpy((float*)job.out + at, x, job.v_dim * sizeof(float));
        return;
    }
    uint16_t* out = (uint16_t*)job.out + at;
    for (int i = 0; i < job.v_dim; i++) out[i] = to_bf16(x[i]);
}

// Normalise a row's sums, put the values into order, undo what was done to a latent K, and write them.
inline void finish_row(const AttendJob& job, int seq, int head, int r, const float* sums, float* x) {
    const int64_t token = job.batch->query_starts[seq] + r / job.share;
    const int q_head = head * job.share + r % job.share;
    float total = sums[1], by = 1;
    if (job.layer->sinks) {
        const float sink = job.layer->sinks[q_head] * LOG2E, top = fmaxf(sink, sums[0]);
        by = exp2(splat(sums[0] - top))[0];
        total = total * by + exp2(splat(sink - top))[0];
    }
    by = by / total;
    const int width = tile_width(job);
    for (int at = 0; at < job.v_width; at += width)
        for (int v = 0; v < width / W; v++)
            for (int i = 0; i < W; i++) x[at + tile_value(job, v, i)] = sums[ACCUM_HEAD + at + v * W + i] * by;
    if (job.layer->k_prefix && !job.raw) {
        rotate(x, job.v_width);  // whole blocks of the rotation, which is its own inverse
        if (const float* mean = job.layer->k_mean)
            for (int d = 0; d < job.v_dim; d++) x[d] += mean[head * job.k_dim + d] * (sums[1] * by);
    }
    write_row(job, token, q_head, x);
}

template <class Products> void attend(const AttendJob& job, const AttendItem& item, float* scratch) {
    constexpr int PAGES = SPAN / PAGE;
    Scratch s;
    lay_out(job, scratch, s);
    const int* starts = job.batch->query_starts + item.seq;
    const int64_t length = job.batch->kv_lengths[item.seq];
    const Rows rows = {item.first_row, item.last_row, length - (starts[1] - starts[0]), job.share, job.layer->window};
    const int64_t begin = std::max<int64_t>(item.first_span * PAGES, rows.oldest(rows.begin) / PAGE);
    const int64_t end = std::min<int64_t>(item.last_span * PAGES, rows.position(rows.end - 1) / PAGE + 1);
    Page page = {}, next = {};
    if (begin < end) page = open_page(job, item, begin);
    if (!item.partial) clear_sums(job, s.row_sums, rows.count());
    const Products products{job, s, item};
    for (int64_t span = item.first_span; span < item.last_span; span++) {
        float* sums = item.partial ? item.partial + (span - item.first_span) * item.partial_stride : s.span_sums;
        clear_sums(job, sums, rows.count());
        for (int64_t p = std::max(begin, span * PAGES); p < std::min(end, (span + 1) * PAGES); p++) {
            if (p + 1 < end) next = open_page(job, item, p + 1);
            const Rows seeing = rows.seeing(page.base, page.base + page.valid);
            Rows young = seeing, settled = seeing;
            young.end = settled.begin = first_settled(job, seeing, p);
            if (young.count()) products.attend(refined(job, s, item, page), nullptr, young, rows.begin, sums);
            if (settled.count()) products.attend(page, p + 1 < end ? &next : nullptr, settled, rows.begin, sums);
            page = next;
        }
        if (!item.partial) merge_rows(job, s.row_sums, sums, rows.count());
    }
    if (item.partial) return;
    for (int r = rows.begin; r < rows.end; r++)
        finish_row(job, item.seq, item.head, r, s.row_sums + (size_t)(r - rows.begin) * job.accum_stride, s.row);
}

// The sums of one row's spans, `stride` floats apart, in the order of the context.
void merge(const AttendJob& job, int seq, int head, int row, float* partials, int spans, int64_t stride, float* scratch) {
    Scratch s;
    lay_out(job, scratch, s);
    clear_sums(job, s.row_sums, 1);
    for (int i = 0; i < spans; i++) merge_rows(job, s.row_sums, partials + i * stride, 1);
    finish_row(job, seq, head, row, s.row_sums, s.row);
}

constexpr Kernels kernels = {append, prepare, attend<Words>, merge, scratch_bytes, &linear_kernels};
