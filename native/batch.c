/* Batches on their way: where the owner's loop has begun the next one before the last has ended, while that runs on the device. */
#include "ring.h"

#define WRITE(p, v) atomic_store_explicit((p), (v), memory_order_relaxed)
_Static_assert((GW_MAX_DEPTH & (GW_MAX_DEPTH - 1)) == 0, "begun and ended wrap around");

/* Says in the segment when the device should be free again (0: nothing is known): the oldest batch has it since running_since_ns, the others are still to have
 * it. Worked out anew at each beginning and end, or predictions that are always a little too long would add up for as long as there is no pause. */
static void foresee(gw_port *port, uint64_t now_ns) {
    uint64_t ends = port->running_since_ns, known = 0;
    for (uint32_t k = port->ended; k != port->begun; k++) {
        uint64_t predicted = port->batches[k % GW_MAX_DEPTH].predicted_ns;
        known |= predicted;
        ends += predicted;
        if (k == port->ended && ends < now_ns) ends = now_ns; /* it takes longer than that */
    }
    _Atomic uint64_t *free_at = &port->header->free_at_ns;
    if (known || GW_PEEK(free_at)) WRITE(free_at, known ? ends : 0);
}

/* Says in the segment since when a batch has been running (0: none is): what takes too long is known by that. */
void gw_stamp_running(gw_port *port, uint64_t since_ns) {
    port->running_since_ns = gw_batches_running(port) ? since_ns : 0;
    WRITE(&port->header->batch_started_ns, port->running_since_ns);
    foresee(port, since_ns);
}

void gw_begin_batch(gw_port *port, gw_batch batch, uint64_t now_ns) {
    if (gw_batches_running(port) == GW_MAX_DEPTH) port->ended++; /* more than any pipeline has: they were given up without gw_finish */
    port->batches[port->begun++ % GW_MAX_DEPTH] = batch;
    if (gw_batches_running(port) == 1) gw_stamp_running(port, now_ns);
}

/* The batch that began with this ticket; size 0 if none did, or its end was told before. Older ones that are still here were given up, too. */
gw_batch gw_end_batch(gw_port *port, uint64_t first) {
    for (uint32_t k = port->ended; k != port->begun; k++)
        if (port->batches[k % GW_MAX_DEPTH].first == first) {
            port->ended = k + 1;
            return port->batches[k % GW_MAX_DEPTH];
        }
    return (gw_batch){0};
}

/* About the batch that gw_take or gw_take_these has just begun. predicted_ns: 0 = unknown. */
void gw_note_batch(gw_port *port, uint64_t predicted_ns, uint64_t tokens, uint64_t padded_tokens) {
    gw_stats *stats = &port->header->stats;
    if (gw_batches_running(port)) {
        port->batches[(port->begun - 1) % GW_MAX_DEPTH].predicted_ns = predicted_ns;
        if (predicted_ns) foresee(port, gw_now());
    }
    GW_TALLY(&stats->tokens, tokens);
    GW_TALLY(&stats->padded_tokens, padded_tokens);
}

/* One step of requests that run for many (gw_admit): it is a batch in the statistics, and what takes too long is known by it. */
void gw_begin_step(gw_port *port, const uint64_t *tickets, uint32_t n) {
    uint64_t now = gw_now();
    for (uint32_t k = 0; k < n; k++) { /* it is theirs from now on: until here an owner's death has not been their fault, see gw_recover */
        gw_slot *slot = gw_slot_at(port, (int64_t)tickets[k]);
        if (slot && slot->dispatch_ns == GW_NOT_BEGUN && gw_is_taken(slot, (int64_t)tickets[k])) slot->dispatch_ns = now;
    }
    port->running_since_ns = now;
    WRITE(&port->header->batch_started_ns, now);
}

/* tickets: those of gw_begin_step. Between steps an owner's death is nobody's fault. */
void gw_end_step(gw_port *port, const uint64_t *tickets, uint32_t n, uint32_t size, uint32_t reason) {
    uint64_t now = gw_now();
    for (uint32_t k = 0; k < n; k++) {
        gw_slot *slot = gw_slot_at(port, (int64_t)tickets[k]);
        if (slot && gw_is_taken(slot, (int64_t)tickets[k])) slot->dispatch_ns = GW_NOT_BEGUN;
    }
    gw_batch_done(port, &(gw_batch){.size = size, .reason = reason}, now - port->running_since_ns, now);
}
