// Registration of an op whose schema is in registration.cpp: one line per op.
//
//   TP_IMPL("swiglu", swiglu, swiglu_meta, swiglu_autograd);
//   TP_IMPL_NO_GRADIENT("swiglu_backward", swiglu_backward, swiglu_backward_meta);
//
// `kernel` serves both devices and checks the device of its tensors. A build without CUDA registers it for
// the CPU only.
#pragma once

#include <torch/library.h>

#define TP_IMPL_FOR(key, op, function)                                     \
  TORCH_LIBRARY_IMPL(transformer_plugin, key, m) { m.impl(op, function); } \
  static_assert(true)

#ifdef TRANSFORMER_PLUGIN_CUDA
#define TP_IMPL_CPU_CUDA(op, kernel) \
  TP_IMPL_FOR(CPU, op, kernel);      \
  TP_IMPL_FOR(CUDA, op, kernel)
#else
#define TP_IMPL_CPU_CUDA(op, kernel) TP_IMPL_FOR(CPU, op, kernel)
#endif

#define TP_IMPL(op, kernel, meta, autograd) \
  TP_IMPL_CPU_CUDA(op, kernel);             \
  TP_IMPL_FOR(Meta, op, meta);              \
  TP_IMPL_FOR(Autograd, op, autograd)

// Autograd falls through: the kernel itself rejects tensors that require a gradient, or its outputs have
// none.
#define TP_IMPL_NO_GRADIENT(op, kernel, meta) TP_IMPL(op, kernel, meta, torch::CppFunction::makeFallthrough())
