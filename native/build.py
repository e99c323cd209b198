"""Builds gpuworker/_native.abi3.so from native/*.c (cffi, API mode: the C compiler checks every struct and signature below).

GPUWORKER_SANITIZE=address in the environment instruments the extension, to run the Python tests under it (with libasan preloaded and
PYTHONMALLOC=malloc). `make sanitize` builds the native tests by themselves. GPUWORKER_FAILPOINTS=1 compiles the failpoints in (failpoints.h).
"""

import os
import pathlib

from cffi import FFI

HERE = pathlib.Path(__file__).parent.name  # setuptools wants paths relative to setup.py
FLAGS = ["-std=c11", "-O2", "-g", "-fvisibility=hidden", "-Wall", "-Wextra"]  # `make check` adds -Werror: a newer compiler should not stop a user
FLAGS += ["-ffp-contract=fast"]  # a * b + c is one instruction in paged_decode.c; with -std=c11 gcc would not
SANITIZE = os.environ.get("GPUWORKER_SANITIZE", "")
SANITIZE_FLAGS = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
FAILPOINTS = os.environ.get("GPUWORKER_FAILPOINTS", "") == "1"

# The parts of layout.h and ring.h that Python uses. `...` leaves offsets and sizes to the compiler.
CDEF = """
enum { GW_FREE, GW_READY, GW_RUNNING, ... };
enum { GW_REJECTED, GW_CANCELLED, GW_EXPIRED, GW_FELL_BACK, GW_FORECAST_LATE, GW_SATISFIED };
enum { GW_ADMIT_ALL, GW_ADMIT_AUTO, GW_ADMIT_IN_TIME };
enum { GW_STARTING, GW_SERVING, GW_RESTARTING, GW_DRAINING, GW_STOPPED, GW_SUPERSEDED, GW_FAILED };
enum { GW_VACANT, GW_ALIVE, GW_LEFT, ... };
enum { GW_REJECT, GW_BLOCK, GW_FALLBACK, ... };
enum { GW_PARK, GW_ADAPTIVE, GW_BUSY, ... };
enum { GW_KIND_BYTES, GW_KIND_STR, GW_KIND_ARRAY, GW_KIND_TREE, GW_KIND_PICKLE, GW_KIND_STREAM, GW_KIND_ERROR, GW_KIND_EXPIRED, GW_KIND_DRAINING,
       GW_KIND_DIED, GW_KIND_STUCK, GW_KIND_FAILED, GW_KIND_LATE, GW_KIND_SPILLED, ... };
enum { GW_RESTARTED, GW_RELOADED, GW_RELOAD_FAILED };
#define GW_LINE ...
#define GW_MAX_CAPACITY ...
#define GW_MAX_PARTICIPANTS ...
#define GW_MAX_META ...
#define GW_MAX_LENGTH ...
#define GW_MAX_REFUSAL ...
#define GW_LANES ...
#define GW_BUCKETS ...
#define GW_REASONS ...
#define GW_EXECUTION ...
#define GW_SLOT_BITS ...
static const int64_t GW_DELIVERED;
#define GW_INFO_BYTES ...
#define GW_NOTE_BYTES ...
#define GW_OWNER_LOCK ...
#define GW_SUPERVISOR_LOCK ...

typedef struct { int64_t pid; uint64_t start_ticks; uint64_t pid_namespace; } gw_identity;
typedef struct { uint64_t ticket, enqueue_ns, deadline_ns, terms, participant; } gw_item;
typedef struct { uint64_t estimated_ns, budget_ns, least_ns; uint32_t depth; } gw_forecast;
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
typedef struct { ...; } gw_stats;
typedef struct { ...; } gw_client_stats;
#define GW_STREAM_ERROR ...
typedef struct { uint64_t life; uint32_t written, entry_bytes, finish, counts[3], error_bytes; ...; } gw_stream;
#define GW_ROW_ARRAYS ...
#define GW_ROW_DIMS ...
#define GW_MAX_DEPTH ...
typedef struct {
    const char *key;
    uint32_t key_bytes;
    const char *dtype;
    uint32_t dtype_bytes;
    uint32_t ndim, itemsize;
    int64_t shape[...];
    char *batch;
    char pad[16];
    int64_t *mask, *lengths;
    uint32_t counted;
    uint64_t below;
} gw_field;
typedef struct {
    uint32_t count, dims;
    int is_tree;
    uint64_t rows;
    uint32_t extents[...], most[...], largest[...];
    uint64_t cells;
    gw_field field[...];
} gw_rows;
typedef struct { const char *source[...]; uint32_t extents[...]; } gw_row;
typedef struct gw_port { char *areas; uint64_t request_bytes, response_bytes; uint32_t capacity, me; ...; } gw_port;

uint64_t gw_segment_bytes(uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes);
int gw_format(void *base, uint32_t capacity, uint32_t max_participants, uint64_t request_bytes, uint64_t response_bytes, uint64_t max_payload_bytes,
              uint64_t nonce);
int gw_check(const void *base, uint64_t file_bytes);

int gw_open(gw_port *port, void *base, uint64_t file_bytes);
void gw_close(gw_port *port);
int gw_is_forked(const gw_port *port);
int gw_open_lock(gw_port *port, int fd);
int gw_join(gw_port *port, int lock_fd, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace);
int gw_leave(gw_port *port);
int gw_try_lock(int fd, uint32_t index);
int gw_unlock(int fd, uint32_t index);
int gw_has_ended(int pidfd);
int gw_is_locked(int fd, uint32_t index);
void gw_keep_lock(gw_port *port, int fd);

int64_t gw_claim(gw_port *port);
int64_t gw_claim_wait(gw_port *port, uint64_t until_ns);
int gw_publish(gw_port *port, int64_t ticket, uint64_t request, uint64_t deadline_ns, uint64_t terms);
int64_t gw_submit(gw_port *port, uint32_t kind, const char *meta, uint32_t meta_bytes, const char *data, uint64_t data_bytes, uint64_t deadline_ns,
                  uint64_t terms);
int64_t gw_submit_quietly(gw_port *port, uint32_t kind, const char *meta, uint32_t meta_bytes, const char *data, uint64_t data_bytes, uint64_t deadline_ns,
                          uint64_t terms);
void gw_ring_doorbell(gw_port *port);
int64_t gw_wait(gw_port *port, int64_t ticket, uint64_t deadline_ns, uint64_t slice_ns);
int64_t gw_poll(gw_port *port, int64_t ticket);
int gw_release(gw_port *port, int64_t ticket);
int gw_receive(gw_port *port, int64_t ticket, uint64_t from, char *into, uint64_t bytes);
int64_t gw_wait_for(gw_port *port, int64_t ticket, uint64_t deadline_ns, uint64_t slice_ns, uint64_t expected, const char *meta, char *into);
int gw_cancel(gw_port *port, int64_t ticket);
int gw_abandon(gw_port *port, int64_t ticket);
int gw_phase(gw_port *port, int64_t ticket);
int64_t gw_unsettled(gw_port *port);
#define GW_TO_THE_END ...
int gw_set_chimes(gw_port *port, const char *prefix, int64_t gid);
int gw_ring_and_spin(gw_port *port, int64_t ticket);
int gw_has_news(const gw_port *port, int64_t ticket, uint32_t seen);
int gw_poll_many(gw_port *port, int fd, const int64_t *tickets, const uint32_t *seen, uint32_t *found, uint32_t *is_over);

int gw_open_backlog(gw_port *port);
const gw_item *gw_backlog(const gw_port *port);
int gw_collect(gw_port *port, uint64_t until_ns);
int gw_take(gw_port *port, int count, uint32_t reason, uint64_t *taken);
int gw_admit(gw_port *port, int count, uint64_t *taken);
int gw_untake(gw_port *port, int64_t ticket);
int gw_take_these(gw_port *port, const uint64_t *tickets, int count, uint32_t reason, uint64_t *taken);
int64_t gw_peek(gw_port *port, int64_t ticket);
int gw_begin_look(gw_port *port, int64_t ticket);
void gw_end_look(gw_port *port, int64_t ticket, int before);
int gw_put_back(gw_port *port, int64_t ticket);
int gw_news(const gw_port *port, const gw_item **arrived, const uint64_t **gone, int *departures);
int gw_respond(gw_port *port, int64_t ticket, uint32_t kind, const char *meta, uint32_t meta_bytes, const char *data, uint64_t data_bytes);
int gw_responded(gw_port *port, int64_t ticket, uint64_t response);
int gw_finish(gw_port *port, const uint64_t *taken, int n);
int gw_read_rows(const gw_port *port, gw_rows *what, const uint64_t *taken, int n, gw_row *rows, int *odd);
void gw_gather(const gw_rows *into, const gw_row *rows, int n);
int gw_scatter(gw_port *port, const gw_rows *from, const gw_row *rows, const uint64_t *taken, int n, int *odd);
uint64_t gw_stream_bytes(uint32_t most, uint32_t entry_bytes);
int64_t gw_stream_open(gw_port *port, int64_t ticket, uint32_t most, uint32_t entry_bytes);
int gw_stream_copy(gw_port *port, int64_t ticket, char *into, uint32_t n, uint32_t entry_bytes);
int gw_stream_append(gw_port *port, const uint64_t *tickets, const uint32_t *at, const char *entries, uint32_t n, uint32_t entry_bytes, int *gone);
int gw_stream_gone(gw_port *port, const uint64_t *tickets, uint32_t n, int *gone);
int gw_stream_end(gw_port *port, int64_t ticket, uint32_t finish, const uint32_t *counts, const char *error, uint32_t error_bytes);
int64_t gw_stream_wait(gw_port *port, int64_t ticket, uint32_t seen, uint64_t deadline_ns, uint64_t slice_ns);
int gw_refuse(gw_port *port, int64_t ticket, uint32_t kind);
int gw_refuse_with(gw_port *port, int64_t ticket, uint32_t kind, const char *data, uint32_t bytes);
int gw_refuse_all(gw_port *port, uint32_t kind);
int gw_expire(gw_port *port, uint64_t now_ns);
int gw_reap(gw_port *port, uint32_t participant);
int gw_free_strays(gw_port *port);
int gw_recover(gw_port *port, uint32_t max_attempts, uint32_t kind);
void gw_count_alive(gw_port *port);
void gw_bell(gw_port *port);
void gw_nudge(gw_port *port);
void gw_set_paused(gw_port *port, int paused);
int gw_is_paused(const gw_port *port);
void gw_wake_all(gw_port *port);
void gw_set_state(gw_port *port, uint32_t state);

void gw_read_header(const gw_port *port, gw_overview *out);
int gw_read_info(const gw_port *port, char *out, uint32_t bytes);
int gw_says(const gw_port *port, const char *known, uint32_t bytes);
int gw_read_note(const gw_port *port, char *out, uint32_t bytes);
uint32_t gw_next_participant(const gw_port *port, uint32_t participant);
int gw_read_participant(const gw_port *port, uint32_t participant, gw_participant_view *out);
int gw_read_stats(const gw_port *port, uint64_t *owner, int owner_words, uint64_t *clients, int client_words);
void gw_publish_execution(gw_port *port, const uint64_t *words, uint32_t n);
void gw_read_execution(const gw_port *port, uint64_t *out);
void gw_set_owner(gw_port *port, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace);
void gw_set_supervisor(gw_port *port, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace);
void gw_count_event(gw_port *port, uint32_t event);
void gw_set_note(gw_port *port, const char *note, uint32_t bytes);
void gw_set_policy(gw_port *port, uint32_t on_full, uint32_t wake, uint32_t quota_shared, uint32_t quota_alone, uint32_t allow_pickle, uint32_t max_batch_size);
int gw_set_info(gw_port *port, const char *info, uint32_t bytes);
void gw_set_wake(gw_port *port, uint32_t wake);
void gw_heartbeat(gw_port *port, uint64_t now_ns);
void gw_begin_step(gw_port *port, const uint64_t *tickets, uint32_t n);
uint64_t gw_deadline(const gw_port *port, int64_t ticket);
void gw_end_step(gw_port *port, const uint64_t *tickets, uint32_t n, uint32_t size, uint32_t reason);
uint32_t gw_attempts(const gw_port *port, int64_t ticket);
void gw_count_client(gw_port *port, uint32_t outcome);
int gw_is_late(const gw_port *port, uint64_t terms, gw_forecast *out);
uint64_t gw_arrived(const gw_port *port, uint32_t lane);
void gw_publish_lane(gw_port *port, uint32_t i, uint64_t length, uint32_t cap, uint64_t run_one_ns, uint64_t run_full_ns);
void gw_publish_lanes(gw_port *port, uint32_t lanes);
void gw_publish_queue(gw_port *port, uint32_t i, uint32_t queued, uint64_t gap_ns, uint64_t seen, uint64_t ran_ns);
void gw_set_scheduling(gw_port *port, uint32_t admission, uint64_t budget_ns, uint64_t max_length, uint32_t priorities, uint32_t fair,
                       uint32_t keeps_news);
void gw_read_scheduling(const gw_port *port, uint64_t *out);
void gw_note_batch(gw_port *port, uint64_t predicted_ns, uint64_t tokens, uint64_t padded_tokens);
uint64_t gw_retry_after_ns(const gw_port *port);
typedef struct { uint64_t ticket, id_high, id_low, span, flags, enqueue_ns, collect_ns, dispatch_ns; } gw_traced;
int gw_trace(gw_port *port, int64_t ticket, uint64_t id_high, uint64_t id_low, uint64_t span, uint32_t flags);
int gw_read_traces(const gw_port *port, const uint64_t *taken, int n, gw_traced *out);
int gw_watch_parent(int pidfd, uint64_t grace_ns);

typedef void gw_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
typedef struct {
    void *blocks;
    int64_t block_count, block_tokens, key_heads, key_width, value_width;
    uint32_t element_bytes;
    const void *key, *value;
    int64_t key_token, key_head, value_token, value_head;
    const int64_t *slots;
    int64_t tokens;
    const void *query;
    void *output;
    int64_t rows, heads, query_row, query_head;
    const int64_t *table;
    const int64_t *lengths;
    int64_t table_width, window;
    float scale;
    uint32_t threads, most_lanes;
    gw_parallel *parallel;
} gw_decode;
int gw_paged_write(const gw_decode *what);
int gw_paged_decode(const gw_decode *what);
int gw_decode_lanes(int64_t key_width, int64_t value_width, uint32_t element_bytes, uint32_t at_most);
"""

FAILPOINTS_CDEF = """
enum { GW_POINT_OFF, GW_POINT_KILL, GW_POINT_STOP, GW_POINT_EXIT };
int gw_failpoint_arm(const char *name, uint32_t action, int32_t nth);
const char *gw_failpoint_name(uint32_t i);
"""

SOURCES = [
    "segment.c", "port.c", "ring.c", "queue.c", "owner.c", "batch.c", "rows.c", "stream.c", "recovery.c", "semaphore.c", "wake.c", "chime.c", "forecast.c",
    "stats.c", "trace.c", "watch.c", "paged_decode.c",
]  # fmt: skip

ffi = FFI()
ffi.cdef(CDEF + FAILPOINTS_CDEF * FAILPOINTS)
ffi.set_source(
    "gpuworker._native",
    '#include "ring.h"\n#include "rows.h"\n#include "paged_decode.h"\n#include "failpoints.h"\n',
    sources=[f"{HERE}/{name}" for name in SOURCES + ["failpoints.c"] * FAILPOINTS],
    depends=[f"{HERE}/{name}" for name in ("layout.h", "ring.h", "rows.h", "paged_decode.h", "paged_decode_lanes.h", "failpoints.h")],
    include_dirs=[HERE],
    extra_compile_args=FLAGS + SANITIZE_FLAGS + ["-DGW_FAILPOINTS"] * FAILPOINTS,
    extra_link_args=["-pthread", *SANITIZE_FLAGS],
)
