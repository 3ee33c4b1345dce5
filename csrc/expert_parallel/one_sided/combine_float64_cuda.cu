// combine of float64 rows.
#include "expert_parallel/one_sided/combine_launch.cuh"

template void transformer_plugin::expert_parallel::one_sided::launch_combine_of<double>(const CombineArgs&,
                                                                                        int, void*);
