/* Requests that say who they are in every word, and answers that say what they answer: a mix-up or a torn copy cannot pass. */
#ifndef GPUWORKER_TESTS_PAYLOAD_H
#define GPUWORKER_TESTS_PAYLOAD_H
#include "rig.h"

enum { WORDS = 20, PAYLOAD_BYTES = WORDS * 8, PAYLOAD_AREA = 192 };

static inline void fill(uint64_t *words, uint64_t id) {
    for (uint64_t j = 0; j < WORDS; j++) words[j] = id * (2 * j + 1);
}
static inline void check_filled(const uint64_t *words, uint64_t id) {
    for (uint64_t j = 0; j < WORDS; j++) EQUAL(words[j], id * (2 * j + 1));
}
static inline uint64_t answer_to(uint64_t id) { return ~id; }

static inline void put_request(gw_port *port, int64_t ticket, uint64_t id) {
    uint64_t words[WORDS];
    fill(words, id);
    memcpy(gw_request_area(port, gw_slot_of(ticket)), words, sizeof words);
}

static inline void receive_answer(gw_port *port, int64_t ticket, uint64_t id) {
    _Alignas(GW_LINE) uint64_t words[WORDS];
    EQUAL(gw_receive(port, ticket, 0, words, sizeof words), 0);
    check_filled(words, answer_to(id));
}

/* Reads a request that was taken and writes its answer into `words`. */
static inline void work_out(gw_port *owner, int64_t ticket, uint64_t request, uint64_t *words) {
    EQUAL(request, gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES));
    memcpy(words, gw_request_area(owner, gw_slot_of(ticket)), PAYLOAD_BYTES);
    check_filled(words, words[0]);
    fill(words, answer_to(words[0]));
}

#endif
