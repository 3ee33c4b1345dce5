// One function for each PTX instruction of Hopper (sm_90a) that the GEMM kernels use, named as in the PTX
// ISA.
#pragma once

#include "gemm/sm90/ptx/mbarrier.cuh"
#include "gemm/sm90/ptx/tma.cuh"
#include "gemm/sm90/ptx/wgmma.cuh"
