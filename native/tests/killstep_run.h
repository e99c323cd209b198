/* Brings a victim to a point, lets happen what the mode says, and settles the world: one row of the report, point by point. */
#ifndef GPUWORKER_TESTS_KILLSTEP_RUN_H
#define GPUWORKER_TESTS_KILLSTEP_RUN_H
#include "killstep_stream.h"

enum { MAX_STEPS = 1 << 16 };

/* One row of the report: a scenario in a mode. */
typedef struct { const scenario *scenario; const mode *mode; } row;

/* What the first run of a row saw, for all workers on that row: at[n] after step n. `steps` is -1 until it is there. */
typedef struct { _Atomic long steps; struct { uint64_t ip; int acted; } at[MAX_STEPS + 1]; } trace;
static trace *path;

/* Read by the parent when a worker has failed. */
typedef struct { uint64_t ip; long point, points, leapt; } progress;
static volatile progress *self;
static progress *all_progress;

static void hook(void (*f)(void)) {
    if (f) f();
}

static void while_asleep(const row *it) {
    hook(it->scenario->ease);
    hook(it->mode->on_sleep);
}

/* Step by step; -1: to the end. -> whether it got to the point. */
static int walk(const row *it, victim *v, long point, int note) {
    long n = 0;
    for (; n != point; n++) {
        if (v->last == ASLEEP) while_asleep(it);
        if (step(v) == OVER) break;
        int acted = v->last == STEPPED && it->mode->each ? it->mode->each() : 0;
        self->ip = v->ip;
        if (!note) continue;
        self->point = n + 1;
        CHECK(n < MAX_STEPS);
        path->at[n + 1].ip = v->last == ASLEEP ? 0 : v->ip;
        path->at[n + 1].acted = acted;
    }
    if (note) path->steps = n;
    return n == point;
}

/* To the trace's step `to` at full speed, `from` being where it is. -> whether it got there. */
static int leap(const row *it, victim *v, long from, long to) {
    long times = 0;
    for (long k = from + 1; k <= to; k++) times += path->at[k].ip == path->at[to].ip;
    if (!set_breakpoint(v, path->at[to].ip)) return 0;
    while (times) {
        if (v->last == ASLEEP) {
            if (!path->at[to].ip && !--times) return 1;
            if (it->mode->each) it->mode->each(); /* it may have taken another path, and missed a place where that was due */
            while_asleep(it);
        }
        if (run_on(v) == OVER) return 0;
        times -= v->last == STEPPED;
    }
    self->ip = v->ip;
    return set_breakpoint(v, 0);
}

/* As walk, by the trace. */
static int leap_to(const row *it, victim *v, long point) {
    long at = 0;
    for (long k = 1; k <= point; k++) {
        if (!path->at[k].acted && k != point) continue;
        if (!leap(it, v, at, k)) return 0;
        if (path->at[k].acted) it->mode->each();
        at = k;
    }
    return 1;
}

static void go_on(const row *it, victim *v) {
    resume_victim(v);
    for (uint64_t start = gw_now(); !has_ended(v); sched_yield()) {
        if (it->mode->fate != PAUSE_ALONE) {
            if (it->mode->each) it->mode->each();
            if (sleeps(v->pid, v->pid)) while_asleep(it);
        }
        in_time(start, "the victim, let go on, has ended");
    }
}

/* A slot that the victim has to do with; its own rather than another one. */
static void note_probe(void) {
    for (uint32_t i = 0, own = 0; i < CAPACITY && !own; i++) {
        uint64_t word = r.owner->slots[i].word;
        own = gw_participant_of(word) >= VICTIM;
        if (gw_phase_of(word) != GW_FREE) w.probe = i;
    }
}

/* Steps or leaps. */
typedef int way(const row *it, victim *v, long point);
static int first_walk(const row *it, victim *v, long point) { return walk(it, v, point, 1); }
static int step_to(const row *it, victim *v, long point) { return walk(it, v, point, 0); }

/* One world, from its making to its end. -> whether the victim got to the point. */
static int run(const row *it, long point, way *go) {
    const scenario *s = it->scenario;
    const mode *m = it->mode;
    world_open();
    hook(s->world);
    hook(m->begin);
    victim v = launch(s->prepare, s->body);
    hook(s->start);
    int there = go(it, &v, point);
    note_probe();
    if (there && (m->stopped || m->fate != KILL)) stop_victim(&v);
    else if (there) kill_victim(&v); /* also in its sleep */
    if (there) hook(s->ease);
    if (there) hook(m->stopped);
    if (there && m->fate == KILL && !v.gone) kill_victim(&v);
    if (!v.gone) go_on(it, &v);
    else if (!there) has_ended(&v);
    hook(m->after);
    hook(s->finally);
    settle();
    return there;
}

static void run_point(const row *it, long point) {
    self->point = point;
    int leapt = point <= path->steps && run(it, point, leap_to), there = leapt || run(it, point, step_to);
    self->points += there;
    self->leapt += leapt;
}

/* Which points of a row: one step, or a random `quota` of all, or every one of the part that is this worker's. */
typedef struct { long only_step, quota; uint64_t dice; int part, parts; } share;

static void run_row(const row *it, share s) {
    world_map();
    if (s.part == 0) run(it, -1, first_walk);
    while (path->steps < 0) usleep(100);
    if (s.only_step >= 0) run_point(it, s.only_step);
    else if (!s.quota)
        for (long point = s.part; point <= path->steps; point += s.parts) run_point(it, point);
    for (; s.quota > 0; s.quota--) run_point(it, below(&s.dice, (uint32_t)path->steps + 1));
}

#endif
