/* formats/pool.h - a thread pool for phases of a few microseconds.
 *
 * The caller's thread takes part.  Workers spin briefly, then sleep, so that a busy machine is not starved.  Items are
 * handed out by an atomic counter; which thread runs an item is not determined, and must not matter.
 */
#ifndef SPK_POOL_H
#define SPK_POOL_H

#include <stdint.h>
#include "formats/status.h"

typedef struct spk_pool spk_pool;

enum { SPK_POOL_THREAD_MAX = 1024 };

/* CPUs that this process may use, 1 to SPK_POOL_THREAD_MAX. */
uint32_t spk_cpu_count(void);

/* thread_count >= 1 includes the caller's thread; 0 means one for each CPU that this process may use.  SPK_E_LIMIT,
 * SPK_E_MEMORY, SPK_E_IO (the system refuses a thread). */
SPK_MUST_CHECK spk_status spk_pool_create(uint32_t thread_count, spk_pool **out, spk_error *err);
void     spk_pool_destroy(spk_pool *pool);               /* NULL is fine */
uint32_t spk_pool_thread_count(const spk_pool *pool);

/* Run fn(context, begin, end, thread_index) over [0, item_count) in pieces of at most grain items (>= 1); returns
 * when all are done.  One caller at a time. */
typedef void spk_pool_fn(void *context, uint64_t begin, uint64_t end, uint32_t thread_index);
void spk_pool_run(spk_pool *pool, uint64_t item_count, uint64_t grain, spk_pool_fn *fn, void *context);

#endif
