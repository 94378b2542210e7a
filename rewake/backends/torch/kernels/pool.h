// The threads that share the work of a step: one pool for a process, made when it is first needed.
//
// A job is a number of pieces, which whoever has time takes from a counter. The caller works, too, and waits only for
// pieces that somebody has begun: a thread that is asleep, or that another process keeps from a core, is not waited for.
// Between two jobs threads spin for microseconds, then they sleep.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

class Pool {
  public:
    static constexpr int64_t MOST_PIECES = 0xFFFF;
    static constexpr int MOST_THREADS = 0xFF;

    static Pool& get() {
        static Pool* const pool = new Pool;  // never destroyed: its threads may outlive everything else
        return *pool;
    }

    // work(i) for each i of [0, pieces), at most MOST_PIECES, on up to `threads` threads.
    template <class Work> void run(int threads, int64_t pieces, Work& work) {
        std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
        if (!mine.owns_lock()) {  // somebody else's job is under way: better alone than later
            for (int64_t i = 0; i < pieces; i++) work(i);
            return;
        }
        threads = std::min(threads, MOST_THREADS);
        while (num_workers_ < threads - 1) std::thread([this, index = ++num_workers_] { serve(index); }).detach();
        call_ = [](void* w, int64_t i) { (*(Work*)w)(i); };
        work_ = &work;
        left_.store(pieces, std::memory_order_relaxed);
        const uint64_t job = (uint64_t)(++number_) << 40 | (uint64_t)threads << 32 | (uint64_t)pieces << 16;
        ticket_.store(job, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        take_pieces(0);
        for (int spins = 0; left_.load(std::memory_order_acquire); spins++)
            spins < SPINS ? pause() : std::this_thread::yield();  // whoever has begun may need this very core to finish
    }

  private:
    static constexpr int SPINS = 1000;  // 20 to 50 us, more than lies between two jobs of a step

    // number of the job (24 bits) | its threads (8) | its pieces (16) | the next piece to take (16)
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> left_{0};  // pieces that are not done
    alignas(64) std::atomic<int> sleepers_{0};
    void (*call_)(void*, int64_t) = nullptr;  // these two stand still while a piece is taken and not done
    void* work_ = nullptr;
    std::mutex caller_, sleep_;
    std::condition_variable wake_;
    int num_workers_ = 0;
    uint32_t number_ = 0;

    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_pause();
#endif
    }

    // Whether the job of a ticket has a piece left for thread `index`; the caller is 0.
    static bool is_open(uint64_t ticket, int index) {
        return (ticket & 0xFFFF) < (ticket >> 16 & 0xFFFF) && index < (int)(ticket >> 32 & 0xFF);
    }

    void take_pieces(int index) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (is_open(ticket, index)) {
            // the whole ticket is compared: a piece of a job that is over cannot be taken
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            call_(work_, (int64_t)(ticket & 0xFFFF));
            left_.fetch_sub(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void serve(int index) {
        for (;;) {
            take_pieces(index);
            int spins = 0;
            while (spins < SPINS && !is_open(ticket_.load(std::memory_order_relaxed), index)) pause(), spins++;
            if (spins < SPINS) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return is_open(ticket_.load(std::memory_order_seq_cst), index); });
            sleepers_.fetch_sub(1, std::memory_order_relaxed);
        }
    }
};
