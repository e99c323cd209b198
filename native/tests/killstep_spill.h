/* Payloads in files of their own, named after slot and life, as gpuworker/segment/spill.py keeps them. */
#ifndef GPUWORKER_TESTS_KILLSTEP_SPILL_H
#define GPUWORKER_TESTS_KILLSTEP_SPILL_H
#include "payload.h"
#include <dirent.h>

#define SPILL_BYTES (1 << 20)
#define SPILLED gw_describe(GW_KIND_BYTES | GW_KIND_SPILLED, 0, PAYLOAD_BYTES)

static int spill_dir = -1;

typedef struct { char text[18]; } spill_name;
static inline spill_name spill_of(int64_t ticket, char kind) { /* kind: q request, r response; then the ticket, by hand: snprintf has many steps */
    spill_name name = {{kind}};
    for (int i = 0; i < 16; i++) name.text[1 + i] = "0123456789abcdef"[ticket >> (60 - 4 * i) & 15];
    return name;
}
static inline void spill_remove(int64_t ticket, char kind) { unlinkat(spill_dir, spill_of(ticket, kind).text, 0); }

static inline void spill_write(int64_t ticket, char kind, const uint64_t *words) {
    spill_remove(ticket, kind); /* an owner may have died with this very response half written */
    int fd = openat(spill_dir, spill_of(ticket, kind).text, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    EQUAL(write(fd, words, PAYLOAD_BYTES), PAYLOAD_BYTES);
    close(fd);
}

static inline void spill_read(int64_t ticket, char kind, uint64_t *words) {
    int fd = openat(spill_dir, spill_of(ticket, kind).text, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    EQUAL(read(fd, words, PAYLOAD_BYTES), PAYLOAD_BYTES);
    close(fd);
}

/* The owner's, after gw_finish: the files that nobody will read any more. */
static inline void spill_clean_up(gw_port *port, int64_t ticket) {
    spill_remove(ticket, 'q');
    if (gw_phase(port, ticket) <= GW_FREE) spill_remove(ticket, 'r');
}

/* Removes the files whose life is over, which the slots' words alone say. -> how many are left */
static inline int spill_sweep(gw_port *port) {
    DIR *files = fdopendir(dup(spill_dir));
    CHECK(files);
    rewinddir(files);
    int left = 0;
    for (struct dirent *file; (file = readdir(files));) {
        if (file->d_name[0] == '.') continue;
        if (gw_phase(port, strtoll(file->d_name + 1, NULL, 16)) <= GW_FREE) unlinkat(spill_dir, file->d_name, 0);
        else left++;
    }
    closedir(files);
    return left;
}

#endif
