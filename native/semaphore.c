/* The slot's semaphore, one futex word: how often it was posted << 1 | somebody may be asleep.
 *
 * A post says "look at the slot's word", no more. Nothing is consumed, so nobody can take what was meant for another: not a waiter whose request was
 * cancelled and whose slot is in its next life already, nor one that is killed when it has just woken up.
 *
 * Poster: P1 the slot's word; P2 old = semaphore += 2; P3 wake all, if old has the flag.
 * Waiter: W1 seen = semaphore |= flag; W2 look at the word; W3 futex_wait(semaphore, seen).
 * If P2 comes before W1, W2 sees the word. If it comes after, P2 finds the flag, and W3, which the kernel compares and queues in one step, either comes
 * before P3 and is woken, or finds another number and does not sleep. A poster killed before P3 takes its own wake along and no other: the flag stays. What it
 * owed is posted again by recovery, with gw_semaphore_post_always.
 *
 * The claimer clears the flag (gw_semaphore_claimed), or each later post would be a system call. Whoever may still sleep there then belongs to a request
 * that was cancelled, and the canceller's post may come after that: so it always wakes. One thread waits for a ticket; others may cancel it.
 *
 * Why not sem_t: glibc counts its sleepers, so a waiter killed in sem_wait makes each later post of that slot a system call (12 -> 316 ns), and it
 * aborts the poster when it finds nonsense in a semaphore, as a frontend may write. Why not permits (0, 1, 2 = asleep): they lose wake-ups, see
 * native/model/permits.pml. */
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <limits.h>

#define ASLEEP 1u
#define POST 2u

void gw_semaphore_post(_Atomic uint32_t *semaphore) {
    if (atomic_fetch_add_explicit(semaphore, POST, memory_order_seq_cst) & ASLEEP) {
        GW_POINT(post_waking);
        gw_futex_wake(semaphore, INT_MAX);
    }
}

void gw_semaphore_post_always(_Atomic uint32_t *semaphore) {
    atomic_fetch_add_explicit(semaphore, POST, memory_order_seq_cst);
    GW_POINT(post_always_waking);
    gw_futex_wake(semaphore, INT_MAX);
}

void gw_semaphore_claimed(_Atomic uint32_t *semaphore) {
    if (GW_PEEK(semaphore) & ASLEEP) atomic_fetch_and_explicit(semaphore, ~ASLEEP, memory_order_seq_cst);
}

/* W1. Then look at the word, and if there is nothing yet, gw_semaphore_sleep with what this returned. */
uint32_t gw_semaphore_declare(_Atomic uint32_t *semaphore) { return atomic_fetch_or_explicit(semaphore, ASLEEP, memory_order_seq_cst) | ASLEEP; }

/* 0: look again. -ETIMEDOUT, -EINTR. */
int gw_semaphore_sleep(_Atomic uint32_t *semaphore, uint32_t seen, uint64_t until_ns) {
    long result = gw_futex_wait(semaphore, seen, until_ns);
    return result == -EAGAIN ? 0 : (int)result;
}
