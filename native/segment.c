/* Formatting and checking a segment. */
#include "ring.h"
#include <errno.h>
#include <string.h>

static uint64_t slots_offset(uint32_t max_participants) { return sizeof(gw_header) + (uint64_t)max_participants * sizeof(gw_participant); }

uint64_t gw_segment_bytes(uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes) {
    return slots_offset(max_participants) + (uint64_t)capacity * (sizeof(gw_slot) + gw_align(request_bytes) + gw_align(response_bytes));
}

int gw_format(void *base, uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes, uint64_t max_payload_bytes, uint64_t nonce) {
    if (!capacity || capacity > GW_MAX_CAPACITY || !max_participants || max_participants > GW_MAX_PARTICIPANTS) return -EINVAL;
    gw_header *header = base;
    header->version = GW_VERSION;
    header->libc_tag = GW_LIBC_TAG;
    header->capacity = capacity;
    header->max_participants = max_participants;
    header->request_bytes = gw_align(request_bytes);
    header->response_bytes = gw_align(response_bytes);
    header->max_payload_bytes = max_payload_bytes;
    header->nonce = nonce;
    header->segment_bytes = gw_segment_bytes(capacity, max_participants, request_bytes, response_bytes);
    gw_slot *slots = (gw_slot *)((char *)base + slots_offset(max_participants));
    for (uint32_t i = 0; i < capacity; i++) sem_init(&slots[i].semaphore, 1, 0); /* all else is zero, as fallocate left it */
    atomic_store_explicit(&header->magic, GW_MAGIC, memory_order_release);
    return 0;
}

int gw_check(const void *base, uint64_t file_bytes) {
    const gw_header *header = base;
    if (file_bytes < sizeof(gw_header) || GW_LOAD(&header->magic) != GW_MAGIC) return -EBADMSG;
    if (header->version != GW_VERSION) return -EPROTONOSUPPORT;
    if (header->libc_tag != GW_LIBC_TAG) return -ELIBACC;
    uint64_t areas = header->request_bytes | header->response_bytes;
    if (!header->capacity || header->capacity > GW_MAX_CAPACITY || !header->max_participants || header->max_participants > GW_MAX_PARTICIPANTS ||
        areas % GW_LINE || areas >= 1ull << 36 || header->segment_bytes > file_bytes ||
        header->segment_bytes != gw_segment_bytes(header->capacity, header->max_participants, header->request_bytes, header->response_bytes))
        return -EILSEQ;
    return 0;
}
