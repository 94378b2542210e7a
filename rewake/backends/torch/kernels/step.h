// A step of a decoder of the Llama family from token ids to logits: included in native.cpp, behind everything it uses.
//
// Activations are float32 between the products. Every row is computed by itself, in an order that neither the other rows
// nor the threads change: a row's K, V and logits are the same bits alone, in a batch and in a prompt, however that is cut. But where there are
// tile registers, a sequence that has more than FEW_ROWS in a step takes them, and its bits are others.

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
        : model_(model), args_(args), kernels_(kernels), linear_(*kernels.linear), threads_(threads), rows_(args.batches->tokens) {
        for (int s = 0; s < args.batches->seqs; s++)
            if (is_tiled(s)) prompt_rows_ += rows_of(s);
    }

    int run() {
        if (!rows_) return OK;
        if (!tokens_known()) return BAD_TOKEN;
        const size_t bytes = lay_out(nullptr);
        lay_out((char*)step_buffer.get(bytes));
        find_places();
        find_turns();
        const int64_t n = rows_;
        share(threads_, n, 32, [&](int64_t a, int64_t z) { linear_.embed(model_.embedding, args_.tokens, model_.embedding_scale, x_, a, z); });
        for (int l = 0; l < model_.num_layers; l++) {
            if (int bad = attention(model_.layers[l])) return bad;
            mlp(model_.layers[l]);
        }
        if (!args_.num_wanted) return OK;
        prepare(last_, x_, model_.norm);
        last_.places = nullptr;  // logits are in the order of what is wanted
        multiply({{&model_.head, args_.logits, model_.head.outputs}}, last_, false);
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
    int64_t prompt_rows_ = 0;
    float *x_, *y_, *qkv_, *attended_, *turns_;  // y: what is added to x behind a norm
    int32_t* places_;                            // rows that are not a prompt's, then those that are
    typedef Inputs Operand[2];  // rows that are not a prompt's, and those that are
    Operand hidden_, heads_, gated_;  // what is multiplied: rows of x, of the heads' outputs, of the gated products
    Inputs last_;                     // and the rows of x that are wanted

    int rows_of(int seq) const { return args_.batches->query_starts[seq + 1] - args_.batches->query_starts[seq]; }
    bool is_tiled(int seq) const { return linear_.tiles && is_prompt(*args_.batches, seq); }

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

    size_t lay_out(char* base) {
        size_t used = 0;
        const auto take = [&](auto*& p, int64_t count) {
            p = (std::remove_reference_t<decltype(p)>)(base + used);
            used += (count * sizeof(*p) + 63) / 64 * 64;
        };
        const auto inputs = [&](Inputs& in, int64_t rows, int columns, int kinds, const int32_t* places) {
            in = {rows, columns, kinds, nullptr, nullptr, nullptr, nullptr, nullptr, places};
            if (kinds & TILED_INPUTS) rows = (rows + 2 * TILED_ROWS - 1) / (2 * TILED_ROWS) * (2 * TILED_ROWS);
            const int64_t pairs = rows * columns / 2, terms = kinds & FIXED_INPUTS ? rows * columns / INPUT_GROUP : 0;
            take(in.pairs, kinds & FIXED_INPUTS ? pairs : 0);
            take(in.high, kinds & (PLAIN_INPUTS | TILED_INPUTS) ? pairs : 0);
            take(in.low, kinds & PLAIN_INPUTS ? pairs : 0);
            take(in.steps, terms);
            take(in.sums, terms);
        };
        const int64_t others = rows_ - prompt_rows_;
        const bool mixed = others && prompt_rows_;
        const auto operand = [&](Operand& of, int columns) {
            inputs(of[0], others, columns, model_.input_kinds, mixed ? places_ : nullptr);
            inputs(of[1], prompt_rows_, columns, TILED_INPUTS, mixed ? places_ + others : nullptr);
        };
        take(places_, mixed ? rows_ : 0);
        take(x_, rows_ * model_.hidden);
        take(y_, model_.layers[0].attention_out_norm ? rows_ * model_.hidden : 0);
        take(qkv_, rows_ * qkv_width());
        take(attended_, rows_ * q_width());
        take(turns_, model_.rotations * rows_ * model_.head_dim);
        operand(hidden_, model_.hidden);
        operand(heads_, q_width());
        operand(gated_, model_.intermediate);
        inputs(last_, args_.num_wanted, model_.hidden, model_.input_kinds, args_.wanted);
        return used;
    }

    void find_places() const {
        if (!hidden_[0].places) return;
        int32_t *other = places_, *prompt = places_ + hidden_[0].rows;
        for (int s = 0; s < args_.batches->seqs; s++)
            for (int i = 0; i < rows_of(s); i++) *(is_tiled(s) ? prompt : other)++ = args_.batches->query_starts[s] + i;
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

    void prepare(const Operand& operand, const float* x, const float* norm) {
        for (const Inputs& in : operand) prepare(in, x, norm);
    }

    void prepare(const Inputs& in, const float* x, const float* norm) {
        if (!in.rows) return;
        const int64_t of_block = in.columns / INPUT_GROUP, least = of_block * ROWS_PER_PIECE / std::min(in.rows, 2 * ROWS_PER_PIECE);
        share(threads_, linear_.groups(in), std::max<int64_t>(1, least), [&](int64_t a, int64_t z) { linear_.prepare(in, x, norm, model_.eps, a, z); });
    }

    struct Product {
        const RwLinear* weights;
        float* out;
        int64_t stride;
    };

    static int64_t tiles(const RwLinear& w) { return (w.outputs + OUTPUT_TILE - 1) / OUTPUT_TILE; }

    void multiply(std::initializer_list<Product> products, const Operand& operand, bool add) {
        for (const Inputs& in : operand)
            if (in.rows) multiply(products, in, add);
    }

    void multiply(std::initializer_list<Product> products, const Inputs& in, bool add) {
        const int64_t unit = in.kinds & TILED_INPUTS ? 2 : 1;  // tiles that are multiplied together
        const auto units = [&](const RwLinear& w) { return (tiles(w) + unit - 1) / unit; };
        int64_t count = 0;
        for (const Product& p : products) count += units(*p.weights);
        share(threads_, count, 1, [&](int64_t a, int64_t z) {
            for (const Product& p : products) {
                const RwLinear& w = *p.weights;
                const int64_t own = units(w);
                if (a < own && z > 0)
                    linear_.multiply(w, in, p.out, p.stride, add, unit * std::max<int64_t>(a, 0), std::min(unit * std::min(z, own), tiles(w)));
                a -= own, z -= own;
            }
        });
    }

    void turn(float* x, int heads, const float* norm, int rotation) {
        const HeadsJob job = {x, norm, turns_ + rotation * rows_ * model_.head_dim, qkv_width(), heads, model_.head_dim, model_.eps};
        share(threads_, rows_ * heads, 32 * ROWS_PER_PIECE, [&](int64_t a, int64_t z) { linear_.turn(job, a, z); });
    }

    // The products join the stream, behind a norm if there is one.
    void join(const RwLinear& weights, const Operand& operand, const float* norm) {
        const int columns = model_.hidden;
        multiply({{&weights, norm ? y_ : x_, columns}}, operand, !norm);
        if (!norm) return;
        share(threads_, rows_, ROWS_PER_PIECE, [&](int64_t a, int64_t z) { linear_.add_normed(x_, y_, norm, model_.eps, columns, a, z); });
    }

    int attention(const RwDenseLayer& layer) {
        const int64_t width = qkv_width(), dim = model_.head_dim;
        float *q = qkv_, *k = q + q_width(), *v = k + kv_width();
        prepare(hidden_, x_, layer.attention_norm);
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
        prepare(heads_, attended_, nullptr);
        join(layer.o, heads_, layer.attention_out_norm);
        return OK;
    }

    void mlp(const RwDenseLayer& layer) {
        prepare(hidden_, x_, layer.mlp_norm);
        const int64_t groups = model_.intermediate / INPUT_GROUP;
        for (int part = 0; part < 2; part++) {
            if (!hidden_[part].rows) continue;
            const GatedJob job = {layer.gate, layer.up, hidden_[part], gated_[part], model_.activation};
            share(threads_, groups, 1, [&](int64_t a, int64_t z) { linear_.multiply_gated(job, a, z); });
        }
        join(layer.down, gated_, layer.mlp_out_norm);
    }
};
