/* The semaphore that we do not have: 0 = no permit, 1 = a permit, 2 = somebody may be asleep; a waiter takes the permit and looks. It loses wake-ups:
 *   - with no death at all: a waiter that was cancelled before it said 2 finds its permit drained by the next claimer, or taken by the next waiter;
 *   - an owner that dies between the exchange of a late post and its wake leaves a 1, and then the next post does not wake;
 *   - a waiter that was cancelled takes the next life's permit, and is killed before it hands it on. */
byte permit[SLOTS];
byte asleep_on[FRONTENDS] = NOBODY;

inline wake(i) {
    atomic {
        if :: asleep_on[0] == i -> asleep_on[0] = NOBODY :: else fi;
        if :: asleep_on[1] == i -> asleep_on[1] = NOBODY :: else fi
    }
}

inline semaphore_claimed(i) { atomic { if :: permit[i] == 1 -> permit[i] = 0 :: else fi } }

inline semaphore_post(i) {
#ifdef PERMITS_WAKE_UNLESS_ZERO
    if :: atomic { permit[i] != 0 -> permit[i] = 1 }; wake(i) :: atomic { permit[i] == 0 -> permit[i] = 1 } fi
#else
    if :: atomic { permit[i] == 2 -> permit[i] = 1 }; wake(i) :: atomic { permit[i] != 2 -> permit[i] = 1 } fi
#endif
}

inline semaphore_post_always(i) { semaphore_post(i) }

inline semaphore_declare(i) { seen = permit[i] }

inline semaphore_sleep(i) {
    if
    :: seen == 1 -> atomic { if :: permit[i] == 1 -> permit[i] = 0 :: else fi }
    :: seen == 0 -> atomic { if :: permit[i] == 0 -> permit[i] = 2; seen = 2 :: else fi }
    :: seen == 2
    fi;
    if
    :: seen == 2 ->
        atomic { if :: permit[i] == 2 -> asleep_on[me] = i :: else fi };
        asleep_on[me] == NOBODY
    :: seen != 2
    fi;
    woken = true
}

inline semaphore_stale(i) { if :: woken -> semaphore_post(i) :: else fi } /* the permit may have been the next life's: hands it on */
