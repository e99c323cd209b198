/* The slot's semaphore (native/semaphore.c): how often it was posted, and whether somebody may be asleep, in one futex word. */
byte posts[SLOTS]; bool may_sleep[SLOTS];
byte asleep_on[FRONTENDS] = NOBODY; /* where the kernel has the frontend's waiting thread queued */

inline wake(i) {
    atomic {
#ifdef BUG_WAKE_ONE
        if :: asleep_on[0] == i -> asleep_on[0] = NOBODY :: asleep_on[1] == i -> asleep_on[1] = NOBODY :: else fi
#else
        if :: asleep_on[0] == i -> asleep_on[0] = NOBODY :: else fi;
        if :: asleep_on[1] == i -> asleep_on[1] = NOBODY :: else fi
#endif
    }
}

inline semaphore_claimed(i) {
#ifdef BUG_CLAIM_STORES_ZERO
    atomic { posts[i] = 0; may_sleep[i] = false }
#else
    may_sleep[i] = false
#endif
}

inline semaphore_post(i) {
    if
#if defined(BUG_POST_DOES_NOT_WAKE)
    :: posts[i]++
#elif defined(BUG_POST_CLEARS_FLAG)
    :: atomic { may_sleep[i] -> posts[i]++; may_sleep[i] = false }; wake(i)
#else
    :: atomic { may_sleep[i] -> posts[i]++ }; wake(i)
#endif
    :: atomic { !may_sleep[i] -> posts[i]++ }
    fi
}

inline semaphore_post_always(i) {
    posts[i]++;
    wake(i)
}

#ifdef BUG_SLEEPER_SETS_NO_FLAG
#define NO_FLAG true
#else
#define NO_FLAG false
#endif

inline semaphore_declare(i) { atomic { may_sleep[i] = !NO_FLAG; seen = posts[i] } } /* then the waiter looks at the slot's word */

inline semaphore_sleep(i) {
    atomic { if :: posts[i] == seen && (may_sleep[i] || NO_FLAG) -> asleep_on[me] = i :: else fi };
    asleep_on[me] == NOBODY
}

inline semaphore_stale(i) { skip }
