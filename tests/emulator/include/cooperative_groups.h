/* tests/emulator/include/cooperative_groups.h - clusters, as far as the project's kernels use them. */
#ifndef SPK_EMULATOR_COOPERATIVE_GROUPS_H
#define SPK_EMULATOR_COOPERATIVE_GROUPS_H

#include "tests/emulator/emulator.hpp"

namespace cooperative_groups {

struct cluster_group {
    unsigned block_rank() const { return emulator::self->block->rank; }
    unsigned num_blocks() const { return (unsigned)emulator::self->block->group->ctas.size(); }
    template <typename T> T *map_shared_rank(T *mine, unsigned rank) const { return (T *)emulator::shared_of_rank((void *)mine, rank); }
    void barrier_arrive() const { emulator::cluster_arrive(); }
    void barrier_wait(const char *file = __builtin_FILE(), int line = __builtin_LINE()) const { emulator::cluster_wait(file, line); }
    void sync(const char *file = __builtin_FILE(), int line = __builtin_LINE()) const {
        emulator::cluster_arrive();
        emulator::cluster_wait(file, line);
    }
};
inline cluster_group this_cluster() { return {}; }

} // namespace cooperative_groups

#endif
