/* The ring: every transition of a slot, as one function named by its verb. C11 and Linux only; no policy, no Python objects.
 *
 * Conventions: a result < 0 is a negative errno, and the slot is as it was (but see gw_publish after gw_leave). Times are CLOCK_MONOTONIC nanoseconds. A `ticket` names one life of one
 * slot: generation << 12 | slot index; any call with a ticket whose life is over returns -ESTALE. Unless said otherwise a call may be made by any
 * number of threads at once, is lock-free (those of port.c take a mutex of the process), and leaves the segment consistent if the process is killed at
 * any instruction of it. */
#ifndef GPUWORKER_RING_H
#define GPUWORKER_RING_H
#include "layout.h"

/* Decides whether spinning is worth it; process-local. See wake.c. */
typedef struct { _Atomic uint32_t score, skip, backoff, waits; } gw_spinner;

/* One collected request, as the owner's queue knows it. */
typedef struct gw_item { uint64_t ticket, enqueue_ns, deadline_ns, terms, participant; } gw_item;

/* A batch on its way: its first ticket, predicted run time (0: unknown), size, reason, and whether nothing else may be on its way with it. */
typedef struct gw_batch { uint64_t first, predicted_ns; uint32_t size, reason, alone; } gw_batch;
#define GW_MAX_DEPTH 8

/* One process's own view of one segment: validated geometry, its place among the participants, what it holds. Process-local. */
typedef struct gw_port {
    gw_header *header;
    gw_participant *participants; /* [0] is participant 1 */
    gw_slot *slots;
    char *areas;
    uint64_t request_bytes, response_bytes, max_payload_bytes;
    uint32_t capacity, max_participants;
    uint32_t me, wake;
    int lock_fd;                      /* this participant's or owner's proof of life, see port.c */
    _Atomic uint32_t forked;          /* set in a forked child, where everything belongs to the parent, and by gw_close */
    _Atomic uint32_t left;            /* gw_leave was called: nothing can be claimed or published any more */
    _Atomic uint32_t inflight;        /* slots this process holds */
    _Atomic uint32_t home;            /* where the next claim starts probing: the slot freed last */
    _Atomic uint32_t blocked;         /* threads of this process waiting for a free slot */
    gw_spinner response_spin, request_spin, brief_spin;
    gw_item *backlog;                 /* the owner's: requests collected and not taken, sorted by enqueue time */
    uint64_t *in_backlog;             /* by slot: the ticket that entered the backlog last, or none once it is taken */
    _Atomic uint64_t *running;        /* by slot: the ticket that gw_take took and gw_finish or gw_untake has not ended, or none */
    uint32_t queued;
    uint32_t fair, keeps_news;        /* see gw_set_scheduling, gw_news */
    gw_item *aside;                   /* room for fair_front */
    gw_item *arrived;                 /* what entered the backlog, and the tickets that left it without being taken, since gw_collect was called last */
    uint64_t *gone;
    uint32_t arrivals, departures;
    uint64_t budget_ns;               /* the owner's own: a frontend cannot change it */
    gw_batch batches[GW_MAX_DEPTH];   /* on their way, see batch.c: those from `ended` to `begun`, modulo GW_MAX_DEPTH */
    uint32_t begun, ended;
    uint64_t running_since_ns;        /* since when the oldest of them has had the device */
    _Atomic uint32_t nudged;          /* gw_nudge was called, and the owner has not looked since */
    _Atomic uint64_t owed[GW_MAX_PARTICIPANTS / 64]; /* whose chimes are to be rung before the present call is over, see chime.c; `owes`: whether any */
    _Atomic uint32_t owes;
    uint32_t chimes_open;             /* of the descriptors that `chimes` keeps, by participant; both under the mutex of port.c */
    struct gw_chime *chimes;
    char chime_prefix[256];           /* of the FIFOs' paths */
    int64_t chime_gid;                /* the group whose FIFOs are trusted beside our own user's; -1: none */
    uint64_t serial;                  /* tells ports apart, also when memory is used again */
    struct gw_port *next;             /* list for the fork handler */
} gw_port;

/* Segment (segment.c) */
uint64_t gw_segment_bytes(uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes);
int gw_format(void *base, uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes, uint64_t max_payload_bytes,
              uint64_t nonce);
int gw_check(const void *base, uint64_t file_bytes); /* 0, -EBADMSG (not ours), -EPROTONOSUPPORT (version), -ENODATA (cut short), -EILSEQ (geometry) */

/* Port (port.c) */
int gw_open(gw_port *port, void *base, uint64_t file_bytes);
void gw_close(gw_port *port);
int gw_is_forked(const gw_port *port);     /* or closed: no call with it does anything any more */
int gw_open_lock(gw_port *port, int fd);
int gw_join(gw_port *port, int lock_fd, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace);
int gw_leave(gw_port *port);
#define GW_OWNER_LOCK 0u                           /* index i is participant i's */
#define GW_SUPERVISOR_LOCK (GW_MAX_PARTICIPANTS + 1u)
int gw_try_lock(int fd, uint32_t index);  /* 0 or -EAGAIN */
int gw_unlock(int fd, uint32_t index);
int gw_has_ended(int pidfd);
int gw_is_locked(int fd, uint32_t index); /* by an open file description other than fd's own */
void gw_keep_lock(gw_port *port, int fd); /* the owner's: closed in forked children, by gw_drop_lock and by gw_close */
void gw_drop_lock(gw_port *port);

/* Frontend (ring.c) */
int64_t gw_claim(gw_port *port);                                    /* -> ticket | -EAGAIN full | -EDQUOT | -ECHILD | -ESHUTDOWN | -ENOTCONN */
int64_t gw_claim_wait(gw_port *port, uint64_t until_ns);            /* the same, waiting for room; -ETIMEDOUT | -EINTR */
int gw_publish(gw_port *port, int64_t ticket, uint64_t request, uint64_t deadline_ns, uint64_t terms);
int64_t gw_submit(gw_port *port, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes, uint64_t deadline_ns,
                  uint64_t terms);
int64_t gw_submit_quietly(gw_port *port, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes, uint64_t deadline_ns,
                          uint64_t terms);
int64_t gw_wait(gw_port *port, int64_t ticket, uint64_t deadline_ns, uint64_t slice_ns); /* -> described response | -ETIMEDOUT | -EINTR | -ESTALE */
int64_t gw_poll(gw_port *port, int64_t ticket);                     /* as gw_wait, at once: -EINPROGRESS */
int gw_release(gw_port *port, int64_t ticket);
int gw_receive(gw_port *port, int64_t ticket, uint64_t from, void *into, uint64_t bytes); /* copies out, and releases */
int64_t gw_wait_for(gw_port *port, int64_t ticket, uint64_t deadline_ns, uint64_t slice_ns, uint64_t expected, const void *meta, void *into);
int gw_abandon(gw_port *port, int64_t ticket);                      /* cancel, or release if it is answered; -> as gw_cancel */
int gw_cancel(gw_port *port, int64_t ticket);                       /* 0 never ran | 1 was running | 2 is answered: nothing changed */
int gw_phase(gw_port *port, int64_t ticket);
int64_t gw_unsettled(gw_port *port);                                /* see ring.c */

/* Event loops (chime.c) */
#define GW_TO_THE_END UINT32_MAX
int gw_set_chimes(gw_port *port, const char *prefix, int64_t gid); /* before anything else: where the FIFOs are, and whose */
int gw_ring_and_spin(gw_port *port, int64_t ticket); /* wake.c */
int gw_has_news(const gw_port *port, int64_t ticket, uint32_t seen);
int gw_poll_many(gw_port *port, int fd, const int64_t *tickets, const uint32_t *seen, uint32_t *found, uint32_t *is_over);

/* Owner (queue.c, owner.c, batch.c, recovery.c). One thread forms and finishes batches; gw_expire and gw_reap may run in one other thread. */
int gw_open_backlog(gw_port *port);                                 /* queue.c */
const gw_item *gw_backlog(const gw_port *port);                      /* what is collected and not taken, oldest first */
int gw_collect(gw_port *port, uint64_t until_ns);                   /* waits for something new -> length of the backlog | -EINTR */
int gw_take(gw_port *port, int count, uint32_t reason, uint64_t *taken);             /* -> n; taken: n pairs of ticket, described request */
int gw_admit(gw_port *port, int count, uint64_t *taken);            /* the same for requests that run for many batches */
int gw_take_these(gw_port *port, const uint64_t *tickets, int count, uint32_t reason, uint64_t *taken); /* the same for any of the backlog */
int64_t gw_peek(gw_port *port, int64_t ticket);                     /* -> described request */
int gw_begin_look(gw_port *port, int64_t ticket);
void gw_end_look(gw_port *port, int64_t ticket, int before);
int gw_put_back(gw_port *port, int64_t ticket);                     /* into the news, if it is READY still: for what gw_take_these left */
int gw_news(const gw_port *port, const gw_item **arrived, const uint64_t **gone, int *departures); /* -> arrivals since gw_collect was called last */
int gw_untake(gw_port *port, int64_t ticket);
int gw_respond(gw_port *port, int64_t ticket, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes);
int gw_responded(gw_port *port, int64_t ticket, uint64_t response);
int gw_finish(gw_port *port, const uint64_t *taken, int n);
/* Answers piece by piece (stream.c) */
int gw_stream_has_begun(const gw_port *port, int64_t ticket);
uint64_t gw_stream_bytes(uint32_t most, uint32_t entry_bytes);      /* what the response area has to have */
int64_t gw_stream_open(gw_port *port, int64_t ticket, uint32_t most, uint32_t entry_bytes);
int gw_stream_copy(gw_port *port, int64_t ticket, void *into, uint32_t n, uint32_t entry_bytes);
int gw_stream_append(gw_port *port, const uint64_t *tickets, const uint32_t *at, const char *entries, uint32_t n, uint32_t entry_bytes, int *gone);
int gw_stream_gone(gw_port *port, const uint64_t *tickets, uint32_t n, int *gone);
int gw_stream_end(gw_port *port, int64_t ticket, uint32_t finish, const uint32_t counts[3], const void *error, uint32_t error_bytes);
int64_t gw_stream_wait(gw_port *port, int64_t ticket, uint32_t seen, uint64_t deadline_ns, uint64_t slice_ns); /* the frontend's */
int gw_refuse(gw_port *port, int64_t ticket, uint32_t kind);        /* READY -> DONE with an empty response of this kind */
int gw_refuse_with(gw_port *port, int64_t ticket, uint32_t kind, const void *data, uint32_t bytes); /* at most GW_MAX_REFUSAL */
#define GW_MAX_REFUSAL 448
int gw_refuse_all(gw_port *port, uint32_t kind);
int gw_expire(gw_port *port, uint64_t now_ns);
int gw_reap(gw_port *port, uint32_t participant);
int gw_free_strays(gw_port *port);
int gw_recover(gw_port *port, uint32_t max_attempts, uint32_t kind);
void gw_count_alive(gw_port *port);
void gw_nudge(gw_port *port);                                       /* ends the owner's gw_collect, or its next one; for the owner's other threads */
void gw_set_paused(gw_port *port, int paused);                     /* whether batches may begin; from any process */
int gw_is_paused(const gw_port *port);
void gw_bell(gw_port *port);                                        /* wakes an owner that sleeps in gw_collect; see gw_nudge */
void gw_wake_all(gw_port *port);                                    /* wakes every waiting frontend, to look at the owner's state */
int gw_count(gw_port *port, uint32_t phase);
void gw_set_state(gw_port *port, uint32_t state);

/* Header and statistics (stats.c): snapshots out, single-writer updates in */
typedef struct {
    gw_identity owner;
    uint64_t epoch, heartbeat_ns, batch_started_ns, started_ns, max_payload_bytes, segment_bytes;
    gw_identity supervisor;
    uint64_t supervisor_epoch, request_bytes, response_bytes, nonce;
    uint32_t state, alive, capacity, max_participants, on_full, wake, quota_shared, quota_alone, allow_pickle, max_batch_size, in_use;
    uint64_t batches;
    uint32_t restarts, reloads, failed_reloads, paused;
} gw_overview;
typedef struct { gw_identity identity; uint64_t word; uint32_t joined, held; } gw_participant_view;
void gw_read_header(const gw_port *port, gw_overview *out);
int gw_read_info(const gw_port *port, char *out, uint32_t bytes);
int gw_says(const gw_port *port, const char *known, uint32_t bytes); /* whether a worker that takes requests still says this of itself */
uint32_t gw_next_participant(const gw_port *port, uint32_t participant);
int gw_read_participant(const gw_port *port, uint32_t participant, gw_participant_view *out);
int gw_read_stats(const gw_port *port, uint64_t *owner, int owner_words, uint64_t *clients, int client_words);
int gw_read_note(const gw_port *port, char *out, uint32_t bytes);
void gw_publish_execution(gw_port *port, const uint64_t *words, uint32_t n);
void gw_read_execution(const gw_port *port, uint64_t out[GW_EXECUTION]);
void gw_set_owner(gw_port *port, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace);
void gw_set_supervisor(gw_port *port, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace);
enum gw_event { GW_RESTARTED = 0, GW_RELOADED, GW_RELOAD_FAILED };
void gw_count_event(gw_port *port, uint32_t event);
void gw_set_note(gw_port *port, const char *note, uint32_t bytes);
void gw_set_policy(gw_port *port, uint32_t on_full, uint32_t wake, uint32_t quota_shared, uint32_t quota_alone, uint32_t allow_pickle, uint32_t max_batch_size);
int gw_set_info(gw_port *port, const char *info, uint32_t bytes);
void gw_set_wake(gw_port *port, uint32_t wake);
void gw_heartbeat(gw_port *port, uint64_t now_ns);
void gw_batch_done(gw_port *port, const gw_batch *batch, uint64_t run_ns, uint64_t now_ns);
void gw_begin_step(gw_port *port, const uint64_t *tickets, uint32_t n);
uint64_t gw_deadline(const gw_port *port, int64_t ticket);          /* of a request that was taken; 0 = none */
void gw_end_step(gw_port *port, const uint64_t *tickets, uint32_t n, uint32_t size, uint32_t reason);
uint32_t gw_attempts(const gw_port *port, int64_t ticket);          /* owners that died while they ran it */
void gw_count_client(gw_port *port, uint32_t outcome);
uint64_t gw_retry_after_ns(const gw_port *port);

/* Forecast (forecast.c): will this request be in time? */
typedef struct { uint64_t estimated_ns, budget_ns, least_ns; uint32_t depth; } gw_forecast;
int gw_is_late(const gw_port *port, uint64_t terms, gw_forecast *out); /* 1: it would be late, and is not to be sent */
void gw_count_arrival(gw_port *port, uint64_t terms);
uint64_t gw_arrived(const gw_port *port, uint32_t lane);
void gw_publish_lane(gw_port *port, uint32_t i, uint64_t length, uint32_t cap, uint64_t run_one_ns, uint64_t run_full_ns);
void gw_publish_lanes(gw_port *port, uint32_t lanes);
void gw_publish_queue(gw_port *port, uint32_t i, uint32_t queued, uint64_t gap_ns, uint64_t seen, uint64_t ran_ns);
void gw_set_scheduling(gw_port *port, uint32_t admission, uint64_t budget_ns, uint64_t max_length, uint32_t priorities, uint32_t fair,
                       uint32_t keeps_news);
void gw_read_scheduling(const gw_port *port, uint64_t out[4]);
void gw_note_batch(gw_port *port, uint64_t predicted_ns, uint64_t tokens, uint64_t padded_tokens);

/* Tracing (trace.c): trace id, span id and flags of W3C trace context */
typedef struct { uint64_t ticket, id_high, id_low, span, flags, enqueue_ns, collect_ns, dispatch_ns; } gw_traced;
int gw_trace(gw_port *port, int64_t ticket, uint64_t id_high, uint64_t id_low, uint64_t span, uint32_t flags); /* the claimer's, before gw_publish */
int gw_read_traces(const gw_port *port, const uint64_t *taken, int n, gw_traced *out);                     /* the owner's, before gw_finish */

/* Parent watch (watch.c) */
int gw_watch_parent(int pidfd, uint64_t grace_ns);

/* Shared by the files above */
uint64_t gw_now(void);
void gw_observe(gw_histogram *histogram, uint64_t ns);
long gw_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t until_ns);
void gw_futex_wake(_Atomic uint32_t *word, int n);
void gw_semaphore_post(_Atomic uint32_t *semaphore);
void gw_semaphore_post_always(_Atomic uint32_t *semaphore);
void gw_semaphore_claimed(_Atomic uint32_t *semaphore);
uint32_t gw_semaphore_declare(_Atomic uint32_t *semaphore);
int gw_semaphore_sleep(_Atomic uint32_t *semaphore, uint32_t seen, uint64_t until_ns);
int gw_end(gw_port *port, gw_slot *slot, int64_t ticket); /* of a run; see owner.c */
int gw_is_taken(const gw_slot *slot, int64_t ticket);
void gw_fair_front(gw_port *port, uint32_t count);        /* queue.c */
void gw_begin_batch(gw_port *port, gw_batch batch, uint64_t now_ns); /* batch.c */
gw_batch gw_end_batch(gw_port *port, uint64_t first);
void gw_stamp_running(gw_port *port, uint64_t since_ns);
static inline int gw_batches_running(const gw_port *port) { return (int)(port->begun - port->ended); }
static inline int gw_runs_alone(const gw_port *port) { return gw_batches_running(port) && port->batches[(port->begun - 1) % GW_MAX_DEPTH].alone; }
void gw_ring_doorbell(gw_port *port);
void gw_owe_chime(gw_port *port, uint32_t participant);
void gw_owe_chime_again(gw_port *port, uint32_t participant);
void gw_ring_chimes(gw_port *port);
void gw_forget_chime(gw_port *port, uint32_t participant);
void gw_close_chimes(gw_port *port);
void gw_lock_ports(void); /* port.c: also held across a fork */
void gw_unlock_ports(void);
void gw_space_wake(gw_port *port);
int gw_spin_until(gw_port *port, gw_spinner *spinner, const _Atomic uint64_t *words, uint32_t n, uint64_t wanted, uint64_t until_ns);
void gw_brief_learn(gw_port *port, uint64_t ns);
void gw_spin_learn(gw_spinner *spinner, uint64_t ns);

#define GW_SLOT_BITS 12
#define GW_NO_TICKET UINT64_MAX
#define GW_NOT_BEGUN UINT64_MAX /* dispatch_ns of what gw_admit has taken, while no step works on it */
#define GW_DELIVERED (1ll << 62) /* of gw_wait_for; no described response has this bit */
#define GW_CAS(word, expected, desired) \
    atomic_compare_exchange_strong_explicit((word), (expected), (desired), memory_order_seq_cst, memory_order_acquire)
#define GW_LOAD(p) atomic_load_explicit((p), memory_order_acquire)
#define GW_PEEK(p) atomic_load_explicit((p), memory_order_relaxed)
#define GW_COUNT(p, n) atomic_fetch_add_explicit((p), (n), memory_order_relaxed)
/* For counters with one writer: no locked instruction. */
#define GW_TALLY(p, n) atomic_store_explicit((p), atomic_load_explicit((p), memory_order_relaxed) + (n), memory_order_relaxed)

static inline uint32_t gw_ready_words(const gw_port *port) { return (port->capacity + 63) / 64; }
static inline uint32_t gw_slot_of(int64_t ticket) { return (uint32_t)ticket & ((1u << GW_SLOT_BITS) - 1); }
static inline gw_slot *gw_slot_at(const gw_port *port, int64_t ticket) { /* NULL: no such slot */
    return ticket < 0 || gw_slot_of(ticket) >= port->capacity ? NULL : &port->slots[gw_slot_of(ticket)];
}
static inline uint64_t gw_life_of(int64_t ticket) { return (uint64_t)ticket >> GW_SLOT_BITS; }
static inline int64_t gw_ticket(uint64_t word, uint32_t slot) { return (int64_t)(gw_generation_of(word) << GW_SLOT_BITS | slot); }
static inline char *gw_request_area(const gw_port *port, uint32_t slot) {
    return port->areas + slot * (port->request_bytes + port->response_bytes);
}
static inline char *gw_response_area(const gw_port *port, uint32_t slot) { return gw_request_area(port, slot) + port->request_bytes; }

#endif
