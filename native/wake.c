/* Sleeping and waking: the owner's doorbell, the futex behind it, and when to spin instead.
 *
 * Doorbell. A frontend: P1 set ready bit; P2 read owner_asleep; if 1: P3 bump bell, P4 futex_wake(bell).
 *           The owner:  O1 seen = bell; O2 owner_asleep = 1; O3 scan ready bits; if none: O4 futex_wait(bell, seen); O5 owner_asleep = 0.
 * P1, P2, P3, O1, O2, O3 are seq_cst, so they have one total order. If P1 comes before O3 the scan sees the bit and nobody sleeps. Otherwise
 * O2 < O3 < P1 < P2, so P2 reads 1 (only the owner writes 0, after its sleep) and P3, P4 follow; and O1 < P3, so the bell differs from `seen` by the
 * time of P4: the kernel, which compares and queues in one step, either does not let the owner sleep or has it queued where P4 wakes it.
 * Only the sleeper clears its flag: a frontend killed between P2 and P4 drops its own wake and nobody else's, as the next one still reads 1.
 * A killed waker is also why no sleep here is unbounded: the owner looks again every tick and the frontends every slice.
 *
 * Spinning saves the wake-up of an idle core (some 20 us each way) and wastes a core when nothing comes. GW_ADAPTIVE spins only while
 *   (1) it would have paid lately: what was waited for came within SPIN_WINDOW_NS of the wait's start, judged also after waits that slept, by
 *       the peer's own time stamps, so that no probing is needed; and
 *   (2) a core is free: each sched_yield is timed, and one that took long ran somebody else. Then it parks, and the next `backoff` waits
 *       park at once; backoff doubles with each such finding and halves with each spin that was left alone. */
#define _GNU_SOURCE
#include "ring.h"
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_WINDOW_NS 50000u
#define YIELD_ALONE_NS 2500u /* a sched_yield that finds nobody else takes 0.3 us here */
#define MAX_BACKOFF 256u
#define SCORE_ONE 1024u

uint64_t gw_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void gw_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

long gw_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t until_ns) {
    struct timespec t = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)}; /* absolute: FUTEX_WAIT_BITSET, monotonic by default */
    return syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &t, NULL, FUTEX_BITSET_MATCH_ANY) ? -errno : 0;
}

void gw_futex_wake(_Atomic uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE, n, NULL, NULL, 0); }

void gw_ring_doorbell(gw_port *port) {
    if (!atomic_load_explicit(&port->header->owner_asleep, memory_order_seq_cst)) return;   /* P2 */
    atomic_fetch_add_explicit(&port->header->bell, 1, memory_order_seq_cst);                /* P3 */
    gw_futex_wake(&port->header->bell, 1);                                                  /* P4 */
}

void gw_bell(gw_port *port) {
    atomic_fetch_add_explicit(&port->header->bell, 1, memory_order_seq_cst);
    gw_futex_wake(&port->header->bell, 1);
}

void gw_space_wake(gw_port *port) {
    /* Pairs with the sleeper in gw_claim_wait: it sets its bit, then scans; we freed a slot, then look. Both seq_cst, so one sees the other. */
    for (uint32_t i = 0; i < GW_MAX_PARTICIPANTS / 64; i++) {
        if (!atomic_load_explicit(&port->header->space_wanted[i], memory_order_seq_cst)) continue;
        atomic_fetch_add_explicit(&port->header->space_bell, 1, memory_order_seq_cst);
        gw_futex_wake(&port->header->space_bell, 1);
        return;
    }
}

static int seen_among(const _Atomic uint64_t *words, uint32_t n, uint64_t wanted) {
    for (uint32_t i = 0; i < n; i++) {
        uint64_t word = GW_LOAD(&words[i]);
        if (wanted ? word == wanted : word != 0) return 1;
    }
    return 0;
}

/* Spins as the port's wake mode says until one of the words is `wanted` (or, for 0, any is not zero). 1 if seen; 0: sleep now. */
int gw_spin_until(gw_port *port, gw_spinner *spinner, const _Atomic uint64_t *words, uint32_t n, uint64_t wanted, uint64_t until_ns) {
    if (seen_among(words, n, wanted)) return 1;
    if (port->wake == GW_PARK) return 0;
    if (port->wake == GW_ADAPTIVE) {
        if (port->cores < 2 || atomic_load_explicit(&spinner->score, memory_order_relaxed) < SCORE_ONE / 2) return 0;
        uint32_t skip = atomic_load_explicit(&spinner->skip, memory_order_relaxed);
        if (skip) {
            atomic_store_explicit(&spinner->skip, skip - 1, memory_order_relaxed);
            return 0;
        }
    }
    uint64_t before = gw_now(), start = before;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            if (seen_among(words, n, wanted)) {
                uint32_t backoff = atomic_load_explicit(&spinner->backoff, memory_order_relaxed);
                if (backoff) atomic_store_explicit(&spinner->backoff, backoff / 2, memory_order_relaxed);
                return 1;
            }
            gw_relax();
        }
        before = gw_now();
        if (before >= until_ns) return 0;
        sched_yield(); /* never spin without: on a shared core the peer would wait for our time slice to end */
        if (port->wake == GW_BUSY) continue;
        uint64_t after = gw_now();
        if (after - before > YIELD_ALONE_NS) {
            uint32_t backoff = atomic_load_explicit(&spinner->backoff, memory_order_relaxed) * 2 + 1;
            if (backoff > MAX_BACKOFF) backoff = MAX_BACKOFF;
            atomic_store_explicit(&spinner->backoff, backoff, memory_order_relaxed);
            atomic_store_explicit(&spinner->skip, backoff, memory_order_relaxed);
            return seen_among(words, n, wanted);
        }
        if (after - start > SPIN_WINDOW_NS) return seen_among(words, n, wanted);
    }
}

/* What was waited for came this long after the wait began, the sleeper's own wake-up not counted. */
void gw_spin_learn(gw_spinner *spinner, uint64_t would_have_taken_ns) {
    uint32_t score = atomic_load_explicit(&spinner->score, memory_order_relaxed);
    score = would_have_taken_ns <= SPIN_WINDOW_NS ? score + (SCORE_ONE - score + 3) / 4 : score - (score + 3) / 4;
    atomic_store_explicit(&spinner->score, score, memory_order_relaxed);
}
