/* The floor: what a round trip to another process costs with nothing but the copies and one wake-up each way.
 *
 * One client, one server, one shared mapping. The copies are those of an identity call: payload -> request area, request area -> response
 * area, response area -> the client's own memory. With spin = 0 the wake-ups are process-shared sem_t; with spin = 1 both sides watch a
 * flag, pausing 64 times between two sched_yield: a spin that never yields is ruinous when both sides share a core.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { HEADER_BYTES = 4096, PAUSES_PER_YIELD = 64 };

struct side {
    _Alignas(64) sem_t semaphore;
    _Alignas(64) _Atomic uint32_t flag;
};

struct floor {
    struct side request, response;
};

_Static_assert(sizeof(struct floor) <= HEADER_BYTES, "the areas begin after the header");

static char *area(struct floor *floor, size_t bytes, int index) {
    return (char *)floor + HEADER_BYTES + (size_t)index * ((bytes + 63) & ~(size_t)63);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void post(struct side *side, int spin) {
    if (spin)
        atomic_store_explicit(&side->flag, 1, memory_order_release);
    else
        sem_post(&side->semaphore);
}

static void wait_for(struct side *side, int spin) {
    if (!spin) {
        while (sem_wait(&side->semaphore) && errno == EINTR) {
        }
        return;
    }
    for (;;) {
        for (int i = 0; i < PAUSES_PER_YIELD; i++) {
            if (atomic_load_explicit(&side->flag, memory_order_acquire)) {
                atomic_store_explicit(&side->flag, 0, memory_order_relaxed);
                return;
            }
            pause_cpu();
        }
        sched_yield();
    }
}

size_t floor_size(size_t bytes) { return HEADER_BYTES + 2 * (bytes + 64); }

void floor_init(struct floor *floor) {
    sem_init(&floor->request.semaphore, 1, 0);
    sem_init(&floor->response.semaphore, 1, 0);
}

/* The server. Never returns. */
void floor_serve(struct floor *floor, size_t bytes, int spin) {
    char *request = area(floor, bytes, 0), *response = area(floor, bytes, 1);
    for (;;) {
        wait_for(&floor->request, spin);
        memcpy(response, request, bytes);
        post(&floor->response, spin);
    }
}

/* The client: calls until until_ns (CLOCK_MONOTONIC). Writes each call's nanoseconds to latencies_ns (the last `capacity` of them) and
 * returns the number of calls, or -1 when a reply did not carry its call's number. */
int64_t floor_loop(struct floor *floor, size_t bytes, int spin, char *payload, char *reply, uint64_t until_ns, uint32_t *latencies_ns,
                   size_t capacity) {
    char *request = area(floor, bytes, 0), *response = area(floor, bytes, 1);
    for (uint32_t call = 0;; call++) {
        memcpy(payload, &call, sizeof call);
        uint64_t begin_ns = now_ns();
        memcpy(request, payload, bytes);
        post(&floor->request, spin);
        wait_for(&floor->response, spin);
        memcpy(reply, response, bytes);
        uint64_t finish_ns = now_ns();
        if (memcmp(reply, &call, sizeof call))
            return -1;
        latencies_ns[call % capacity] = (uint32_t)(finish_ns - begin_ns);
        if (finish_ns >= until_ns)
            return (int64_t)call + 1;
    }
}
