/* Checks that say where and what, then end the process (a forked child too); and seeded random numbers. */
#ifndef GPUWORKER_TESTS_CHECK_H
#define GPUWORKER_TESTS_CHECK_H
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

static _Thread_local const char *context = ""; /* the case being run, printed with a failure */

static inline void fail(const char *file, int line, const char *what, long long actual, long long expected) {
    fprintf(stderr, "%s:%d: %s %s is %lld, not %lld\n", file, line, context, what, actual, expected);
    _exit(1);
}

#define EQUAL(actual, expected) \
    do { \
        long long actual_ = (long long)(actual), expected_ = (long long)(expected); \
        if (actual_ != expected_) fail(__FILE__, __LINE__, #actual, actual_, expected_); \
    } while (0)
#define CHECK(condition) EQUAL(!!(condition), 1)

static inline uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
static inline uint32_t below(uint64_t *state, uint32_t n) { return (uint32_t)(next_random(state) % n); }

#endif
