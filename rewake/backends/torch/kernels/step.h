// A step of a decoder of the Llama family from token ids to logits: included in native.cpp, behind everything it uses.
//
// Activations are float32 between the products. Every row is computed by itself, in an order that neither the other rows
// nor the threads change: a row's K, V and logits are the same bits alone, in a batch and in a prompt, however that is cut.

// What changes from step to step.
struct StepArgs {
    uint8_t* arena;
    int64_t arena_bytes;
    const RwLayout* layouts;
    const RwBatch* batches;  // of each slot of a page: they differ in where pages lie
    const int32_t *tokens, *positions;
    const int32_t* wanted;  // rows whose logits are wanted
    int32_t num_wanted;
    float* logits;  // [num_wanted, vocabulary]
};

constexpr int64_t ROWS_PER_PIECE = 4, VALUES_PER_PIECE = 16384;

class Step {
  public:
    Step(const RwDense& model, const StepArgs& args, const Kernels& kernels, int threads)
        : model_(model), args_(args), kernels_(kernels), linear_(*kernels.linear), threads_(threads), rows_(args.batches->tokens) {}

    int run() {
        if (!rows_) return OK;
        if (!tokens_known()) return BAD_TOKEN;
        const size_t bytes = lay_out(nullptr);
        lay_out((char*)step_buffer.get(bytes));
        find_turns();
        const int64_t n = rows_;
        share(threads_, n, 32, [&](int64_t a, int64_t z) { linear_.embed(model_.embedding, args_.tokens, model_.embedding_scale, x_, a, z); });
        for (int l = 0; l < model_.num_layers; l++) {
            if (int bad = attention(model_.layers[l])) return bad;
            mlp(model_.layers[l]);
        }
        if (!args_.num_wanted) return OK;
        Inputs last = hidden_;
        last.rows = args_.num_wanted, last.kinds = kinds_for(last.rows);
        prepare(last, x_, args_.wanted, model_.norm);
        multiply({{&model_.head, args_.logits, model_.head.outputs}}, last, false);
        if (model_.logit_cap > 0) {
            const int64_t values = (int64_t)args_.num_wanted * model_.head.outputs;
            share(threads_, values, VALUES_PER_PIECE, [&](int64_t a, int64_t z) { linear_.cap(args_.logits, model_.logit_cap, a, z); });
        }
        return OK;
    }

  private:
    const RwDense& model_;
    const StepArgs args_;
    const Kernels& kernels_;
    const LinearKernels& linear_;
    const int threads_;
    const int64_t rows_;
    float *x_, *y_, *qkv_, *attended_, *turns_;  // y: what is added to x behind a norm
    Inputs hidden_, heads_, gated_;  // what is multiplied: rows of x, of the heads' outputs, of the gated products

    bool tokens_known() const {
        for (int64_t i = 0; i < rows_; i++)
            if (args_.tokens[i] < 0 || args_.tokens[i] >= model_.embedding.outputs || args_.positions[i] < 0) return false;
        for (int i = 0; i < args_.num_wanted; i++)
            if (args_.wanted[i] < 0 || args_.wanted[i] >= rows_) return false;
        return true;
    }

    int q_width() const { return model_.q_heads * model_.head_dim; }
    int kv_width() const { return model_.kv_heads * model_.head_dim; }
    int64_t qkv_width() const { return q_width() + 2 * kv_width(); }

    // How so many rows are best multiplied, which changes no bits.
    int kinds_for(int64_t rows) const {
        const bool tiled = model_.input_kinds == FIXED_INPUTS && linear_.least_tiled && rows >= linear_.least_tiled;
        return tiled ? TILED_INPUTS : model_.input_kinds;
    }

    size_t lay_out(char* base) {
        size_t used = 0;
        const auto take = [&](auto*& p, int64_t count) {
            p = (std::remove_reference_t<decltype(p)>)(base + used);
            used += (count * sizeof(*p) + 63) / 64 * 64;
        };
        const auto inputs = [&](Inputs& in, int columns) {
            const int kinds = model_.input_kinds;
            const int64_t rows = round_up((int)rows_, TILED_ROWS);
            in = {rows_, columns, kinds_for(rows_), nullptr, nullptr, nullptr, nullptr, nullptr};
            take(in.pairs, kinds & FIXED_INPUTS ? rows * columns / 2 : 0);
            take(in.high, kinds & PLAIN_INPUTS ? rows_ * columns / 2 : 0);
            take(in.low, kinds & PLAIN_INPUTS ? rows_ * columns / 2 : 0);
            take(in.steps, rows * columns / INPUT_GROUP);
            take(in.sums, rows * columns / INPUT_GROUP);
        };
        take(x_, rows_ * model_.hidden);
        take(y_, model_.layers[0].attention_out_norm ? rows_ * model_.hidden : 0);
        take(qkv_, rows_ * qkv_width());
        take(attended_, rows_ * q_width());
        take(turns_, model_.rotations * rows_ * model_.head_dim);
        inputs(hidden_, model_.hidden);
        inputs(heads_, q_width());
        inputs(gated_, model_.intermediate);
        return used;
    }

    // Cosines and sines of every row's position, for each rotation; of the angle as float32, as models are trained.
    void find_turns() {
        const int half = model_.head_dim / 2;
        share(threads_, model_.rotations * rows_, 32, [&](int64_t a, int64_t z) {
            for (; a < z; a++)
                for (int i = 0; i < half; i++) {
                    const float angle = (float)args_.positions[a % rows_] * model_.frequencies[a / rows_ * half + i];
                    turns_[a * model_.head_dim + i] = (float)cos((double)angle);
                    turns_[a * model_.head_dim + half + i] = (float)sin((double)angle);
                }
        });
    }

    void prepare(const Inputs& in, const float* x, const int32_t* rows, const float* norm) {
        share(threads_, in.rows, ROWS_PER_PIECE, [&](int64_t a, int64_t z) { linear_.prepare(in, x, rows, norm, model_.eps, a, z); });
    }

    struct Product {
        const RwLinear* weights;
        float* out;
        int64_t stride;
    };

    static int64_t tiles(const RwLinear& w) { return (w.outputs + OUTPUT_TILE - 1) / OUTPUT_TILE; }

    void multiply(std::initializer_list<Product> products, const Inputs& in, bool add) {
        int64_t count = 0;
        for (const Product& p : products) count += tiles(*p.weights);
        share(threads_, count, 1, [&](int64_t a, int64_t z) {
            for (const Product& p : products) {
                const int64_t own = tiles(*p.weights);
                if (a < own && z > 0) linear_.multiply(*p.weights, in, p.out, p.stride, add, std::max<int64_t>(a, 0), std::min(z, own));
                a -= own, z -= own;
            }
        });
    }

    void turn(float* x, int heads, const float* norm, int rotation) {
        const HeadsJob job = {x, norm, turns_ + rotation * rows_ * model_.head_dim, qkv_width(), heads, model_.head_dim, model_.eps};
        share(threads_, rows_ * heads, 32 * ROWS_PER_PIECE, [&](int64_t a, int64_t z) { linear_.turn(job, a, z); });
    }

    // The products join the stream, behind a norm if there is one.
    void join(const RwLinear& weights, const Inputs& in, const float* norm) {
        const int columns = model_.hidden;
        multiply({{&weights, norm ? y_ : x_, columns}}, in, !norm);
        if (!norm) return;
        share(threads_, rows_, ROWS_PER_PIECE, [&](int64_t a, int64_t z) { linear_.add_normed(x_, y_, norm, model_.eps, columns, a, z); });
    }

    int attention(const RwDenseLayer& layer) {
        const int64_t width = qkv_width(), dim = model_.head_dim;
        float *q = qkv_, *k = q + q_width(), *v = k + kv_width();
        prepare(hidden_, x_, nullptr, layer.attention_norm);
        multiply({{&layer.q, q, width}, {&layer.k, k, width}, {&layer.v, v, width}}, hidden_, false);
        turn(q, model_.q_heads, layer.q_norm, layer.rotation);
        turn(k, model_.kv_heads, layer.k_norm, layer.rotation);
        const RwBatch* batch = args_.batches + layer.slot;
        const AppendJob append = {args_.arena, args_.layouts, batch, &layer.attention, {k, width, dim, 0}, {v, width, dim, 0}, model_.kv_heads};
        if (Refusal bad = run_append(append, args_.arena_bytes, kernels_, threads_)) return bad;
        AttendJob attend = {};
        attend.arena = args_.arena, attend.layouts = args_.layouts, attend.batch = batch, attend.layer = &layer.attention;
        attend.q = {q, width, dim, 0};
        attend.out = attended_, attend.q_heads = model_.q_heads;
        if (Refusal bad = run_attend(attend, args_.arena_bytes, kernels_, threads_)) return bad;
        prepare(heads_, attended_, nullptr, nullptr);
        join(layer.o, heads_, layer.attention_out_norm);
        return OK;
    }

    void mlp(const RwDenseLayer& layer) {
        prepare(hidden_, x_, nullptr, layer.mlp_norm);
        const int64_t groups = model_.intermediate / INPUT_GROUP;
        const GatedJob job = {layer.gate, layer.up, hidden_, gated_, model_.activation};
        share(threads_, groups, 1, [&](int64_t a, int64_t z) { linear_.multiply_gated(job, a, z); });
        join(layer.down, gated_, layer.mlp_out_norm);
    }
};
