/* Formatting and checking a segment. */
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <string.h>

static uint64_t slots_offset(uint32_t max_participants) { return sizeof(gw_header) + (uint64_t)max_participants * sizeof(gw_participant); }

uint64_t gw_segment_bytes(uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes) {
    return slots_offset(max_participants) + (uint64_t)capacity * (sizeof(gw_slot) + gw_align(request_bytes) + gw_align(response_bytes));
}

/* A test build may have counters start just below their wrap. */
#ifndef GW_FIRST_GENERATION
#define GW_FIRST_GENERATION 0
#define GW_FIRST_COUNT 0
#endif
static void start_high(gw_header *header, char *base) {
    gw_slot *slots = (gw_slot *)(base + slots_offset(header->max_participants));
    for (uint32_t i = 0; i < header->capacity; i++) atomic_store_explicit(&slots[i].word, gw_word(GW_FIRST_GENERATION, 0, GW_FREE), memory_order_relaxed);
    gw_participant *participants = (gw_participant *)(header + 1);
    for (uint32_t i = 0; i < header->max_participants; i++) atomic_store_explicit(&participants[i].word, ~0ull << 2 & ~(3ull << 2), memory_order_relaxed);
    atomic_store_explicit(&header->bell, GW_FIRST_COUNT, memory_order_relaxed);
    atomic_store_explicit(&header->space_bell, GW_FIRST_COUNT, memory_order_relaxed);
}

int gw_format(void *base, uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes, uint64_t max_payload_bytes, uint64_t nonce) {
    if (!capacity || capacity > GW_MAX_CAPACITY || !max_participants || max_participants > GW_MAX_PARTICIPANTS) return -EINVAL;
    gw_header *header = base;
    header->version = GW_VERSION;
    header->capacity = capacity;
    header->max_participants = max_participants;
    header->request_bytes = gw_align(request_bytes);
    header->response_bytes = gw_align(response_bytes);
    header->max_payload_bytes = max_payload_bytes;
    header->nonce = nonce;
    header->segment_bytes = gw_segment_bytes(capacity, max_participants, request_bytes, response_bytes);
    if (GW_FIRST_GENERATION | GW_FIRST_COUNT) start_high(header, base); /* all else is zero, as fallocate left it */
    GW_POINT(format_written);
    atomic_store_explicit(&header->magic, GW_MAGIC, memory_order_release);
    return 0;
}

int gw_check(const void *base, uint64_t file_bytes) {
    const gw_header *header = base;
    if (file_bytes < GW_LINE || GW_LOAD(&header->magic) != GW_MAGIC) return -EBADMSG;
    if (header->version != GW_VERSION) return -EPROTONOSUPPORT;
    if (file_bytes < sizeof(gw_header)) return -ENODATA;
    uint64_t areas = header->request_bytes | header->response_bytes;
    if (!header->capacity || header->capacity > GW_MAX_CAPACITY || !header->max_participants || header->max_participants > GW_MAX_PARTICIPANTS ||
        areas % GW_LINE || areas >= 1ull << 36 ||
        header->segment_bytes != gw_segment_bytes(header->capacity, header->max_participants, header->request_bytes, header->response_bytes))
        return -EILSEQ;
    return header->segment_bytes > file_bytes ? -ENODATA : 0;
}
