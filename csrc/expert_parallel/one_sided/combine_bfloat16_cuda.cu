// combine of bfloat16 rows.
#include "expert_parallel/one_sided/combine_launch.cuh"

template void transformer_plugin::expert_parallel::one_sided::launch_combine_of<__nv_bfloat16>(
    const CombineArgs&, int, void*);
