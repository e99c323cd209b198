/* The mutant of `make mutant`: every memory order is relaxed. ThreadSanitizer must see that. */
#include <stdatomic.h>
#define memory_order_acquire memory_order_relaxed
#define memory_order_release memory_order_relaxed
#define memory_order_acq_rel memory_order_relaxed
#define memory_order_seq_cst memory_order_relaxed
