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
 * Spinning saves two system calls and the wake-up of an idle core (some 20 us each way on the machines we measured), and wastes a core when nothing
 * comes. GW_ADAPTIVE spins while that pays:
 *   (1) What is bounded is the work of spinning, SPIN_ROUNDS of at most a microsecond or so each, not the time that passes: every round ends with sched_yield, and
 *       what runs meanwhile (the peer, perhaps on this very core) is no waste. With more processes than cores this is how they hand each other the
 *       core, for less than sleeping and waking costs.
 *   (2) It is tried only while it has lately succeeded (`score`, a mean over some four waits; a wait that slept counts as a success when the peer's own
 *       time stamp says that a spin would have caught it). One wait in PROBE_EVERY spins anyway, to notice when things change.
 *   (3) A sched_yield that takes longer than FOREIGN_NS has run somebody who does not hand back: then it parks, as do the next `backoff` waits, twice
 *       as many each time, up to MAX_BACKOFF; a sleeper is woken ahead of such a process, a spinner would queue behind it. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOKS_A_ROUND 32
#define SPIN_ROUNDS 48
#define SPIN_NS 50000u  /* about what those rounds take on a core of their own */
#define BRIEF_ROUNDS 20
#define SHORT_ROUNDS 4    /* rounds of a single look, on a core that others want, count as one */
#define ALONE_NS 1500u  /* a sched_yield that finds nobody else returns within this */
#define FOREIGN_NS 1000000u
#define PROBE_EVERY 64u
#define MAX_BACKOFF 1024u
#define SCORE_ONE 1024u

uint64_t gw_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void relax(void) {
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
    if (atomic_load_explicit(&port->header->owner_asleep, memory_order_seq_cst)) gw_bell(port); /* P2 */
}

void gw_bell(gw_port *port) {
    GW_POINT(bell_due);
    atomic_fetch_add_explicit(&port->header->bell, 1, memory_order_seq_cst); /* P3 */
    GW_POINT(bell_bumped);
    gw_futex_wake(&port->header->bell, 1);                                   /* P4 */
}

/* Ends the owner's wait in gw_collect, or its next one, also when nothing has arrived. From any thread of the owner's process. `nudged` is to the owner as a ready
 * bit is: set (P1) before its flag is read (P2), scanned (O3) after the flag is set (O2). */
void gw_nudge(gw_port *port) {
    atomic_store_explicit(&port->nudged, 1, memory_order_seq_cst);
    gw_ring_doorbell(port);
}

/* The owner looks at the word before each decision, so nothing begins after the one that it is at. The bell spares it the rest of a sleep that began with the old
 * value: one that begins between the store and the bell, with the old value looked at before both, lasts its full length (the owner's tick, 0.1 s). */
void gw_set_paused(gw_port *port, int paused) {
    atomic_store_explicit(&port->header->paused, paused != 0, memory_order_seq_cst);
    gw_bell(port);
}

int gw_is_paused(const gw_port *port) { return GW_PEEK(&port->header->paused) != 0; }

void gw_space_wake(gw_port *port) {
    /* Pairs with the sleeper in gw_claim_wait: it sets its bit, then scans; we freed a slot, then look. Both seq_cst, so one sees the other. */
    for (uint32_t i = 0; i < GW_MAX_PARTICIPANTS / 64; i++) {
        if (!atomic_load_explicit(&port->header->space_wanted[i], memory_order_seq_cst)) continue;
        GW_POINT(space_due);
        atomic_fetch_add_explicit(&port->header->space_bell, 1, memory_order_seq_cst);
        GW_POINT(space_bumped);
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

/* Whether this wait should begin with a spin. Races between threads of one process only blur the estimates. */
static int should_spin(gw_port *port, gw_spinner *spinner) {
    if (port->wake != GW_ADAPTIVE) return port->wake == GW_BUSY;
    uint32_t skip = atomic_load_explicit(&spinner->skip, memory_order_relaxed);
    if (skip) {
        atomic_store_explicit(&spinner->skip, skip - 1, memory_order_relaxed);
        return 0;
    }
    return atomic_load_explicit(&spinner->score, memory_order_relaxed) >= SCORE_ONE / 2 || GW_COUNT(&spinner->waits, 1) % PROBE_EVERY == 0;
}

static void learn(gw_spinner *spinner, int success) {
    uint32_t score = atomic_load_explicit(&spinner->score, memory_order_relaxed);
    score = success ? score + (SCORE_ONE - score + 3) / 4 : score - (score + 7) / 8;
    atomic_store_explicit(&spinner->score, score, memory_order_relaxed);
}

static void back_off(gw_spinner *spinner) {
    uint32_t backoff = atomic_load_explicit(&spinner->backoff, memory_order_relaxed) * 2 + 1;
    if (backoff > MAX_BACKOFF) backoff = MAX_BACKOFF;
    atomic_store_explicit(&spinner->backoff, backoff, memory_order_relaxed);
    atomic_store_explicit(&spinner->skip, backoff, memory_order_relaxed);
}

/* Spins as the port's wake mode says until one of the words is `wanted` (or, for 0, any is not zero). 1 if seen; 0: sleep now. */
static int spin(gw_port *port, gw_spinner *spinner, const _Atomic uint64_t *words, uint32_t n, uint64_t wanted, uint64_t until_ns, int rounds) {
    if (seen_among(words, n, wanted) || GW_PEEK(&port->nudged)) return 1;
    if (!should_spin(port, spinner)) return 0;
    int looks = LOOKS_A_ROUND;
    for (int spent = 0;;) {
        for (int i = 0; i < looks; i++) {
            if (seen_among(words, n, wanted) || GW_PEEK(&port->nudged)) {
                uint32_t backoff = atomic_load_explicit(&spinner->backoff, memory_order_relaxed);
                if (backoff && spent) /* it yielded, and got the core back: nobody keeps it now */
                    atomic_store_explicit(&spinner->backoff, backoff / 2, memory_order_relaxed);
                learn(spinner, 1);
                return 1;
            }
            relax();
        }
        uint64_t before = gw_now();
        if (before >= until_ns) return 0;
        sched_yield(); /* never spin without: on a shared core the peer would wait for our time slice to end */
        if (port->wake == GW_BUSY) continue;
        uint64_t away = gw_now() - before;
        spent += looks == 1 ? 1 : SHORT_ROUNDS;
        looks = away < ALONE_NS ? LOOKS_A_ROUND : 1; /* others want this core: look once each time it comes round */
        if (away > FOREIGN_NS) back_off(spinner);
        else if (spent < rounds * SHORT_ROUNDS) continue;
        else learn(spinner, 0);
        return seen_among(words, n, wanted);
    }
}

int gw_spin_until(gw_port *port, gw_spinner *spinner, const _Atomic uint64_t *words, uint32_t n, uint64_t wanted, uint64_t until_ns) {
    return spin(port, spinner, words, n, wanted, until_ns, SPIN_ROUNDS);
}

/* Rings the doorbell for a ticket that was published quietly. For an event loop that has nothing else on its way: it spins as gw_wait does, but for less, as its
 * other tasks wait meanwhile. 1: the ticket is answered. What came soon without a spin is told by gw_brief_learn. */
int gw_ring_and_spin(gw_port *port, int64_t ticket) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot || gw_is_forked(port)) return 0;
    gw_ring_doorbell(port);
    uint64_t until = port->wake == GW_BUSY ? gw_now() + BRIEF_ROUNDS * 1000u : UINT64_MAX;
    return spin(port, &port->brief_spin, &slot->word, 1, gw_word(gw_life_of(ticket), port->me, GW_DONE), until, BRIEF_ROUNDS);
}

void gw_brief_learn(gw_port *port, uint64_t ns) {
    if (ns <= BRIEF_ROUNDS * 1000u) learn(&port->brief_spin, 1);
}

/* After a wait that slept: what it waited for came `ns` after its start, the sleeper's own wake-up not counted. */
void gw_spin_learn(gw_spinner *spinner, uint64_t ns) {
    if (ns <= SPIN_NS) learn(spinner, 1);
}
