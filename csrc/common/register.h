// Registration of the kernels of an op, whose schema is in registration.cpp: one line per op.
//
//   TP_IMPL(activation, activation, activation_meta, activation_autograd);
//   TP_IMPL_NO_GRADIENT(activation_backward, activation_backward, activation_backward_meta);
//
// The first is the op's handle in common/ops/, with whose types those of the kernels are compared. `kernel` serves both devices and
// checks the device of its tensors. A build without CUDA registers it for the CPU only.
#pragma once

#include <torch/library.h>

#include "common/op.h"

#define TP_IMPL_FOR(key, op, ...)                                                               \
  TORCH_LIBRARY_IMPL(transformer_plugin, key, m) {                                              \
    m.impl(::transformer_plugin::ops::op.name,                                                  \
           ::transformer_plugin::checked_kernel(::transformer_plugin::ops::op, (__VA_ARGS__))); \
  }                                                                                             \
  static_assert(true)

#ifdef TRANSFORMER_PLUGIN_CUDA
#define TP_IMPL_CPU_CUDA(op, ...)    \
  TP_IMPL_FOR(CPU, op, __VA_ARGS__); \
  TP_IMPL_FOR(CUDA, op, __VA_ARGS__)
#else
#define TP_IMPL_CPU_CUDA(op, ...) TP_IMPL_FOR(CPU, op, __VA_ARGS__)
#endif

#define TP_IMPL(op, kernel, meta, autograd) \
  TP_IMPL_CPU_CUDA(op, kernel);             \
  TP_IMPL_FOR(Meta, op, meta);              \
  TP_IMPL_FOR(Autograd, op, autograd)

// Autograd falls through: the kernel itself rejects tensors that require a gradient, or its outputs have
// none.
#define TP_FALL_THROUGH(key, op)                                                       \
  TORCH_LIBRARY_IMPL(transformer_plugin, key, m) {                                     \
    m.impl(::transformer_plugin::ops::op.name, torch::CppFunction::makeFallthrough()); \
  }                                                                                    \
  static_assert(true)

#define TP_IMPL_NO_GRADIENT(op, kernel, meta) \
  TP_IMPL_CPU_CUDA(op, kernel);               \
  TP_IMPL_FOR(Meta, op, meta);                \
  TP_FALL_THROUGH(Autograd, op)
