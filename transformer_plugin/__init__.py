"""Low-precision and mixture-of-experts building blocks for PyTorch. Importing starts no CUDA context."""

from transformer_plugin._program import is_starting

__version__ = "0.1.0"

if not is_starting():  # the doctor, which has to run where nothing of this can be imported
    from transformer_plugin import _library

    _library.load()

    from transformer_plugin import (
        _flops,
        _on_import,
        _public,
        activations,
        errors,
        formats,
        functional,
        integrations,
        nn,
        ops,
        optim,
        parallel,
        recipes,
    )
    from transformer_plugin.functional import *  # noqa: F403
    from transformer_plugin.functional import _compiled
    from transformer_plugin.launch import LaunchOptions
    from transformer_plugin.nn import _pipelining
    from transformer_plugin.nn.checkpoint import checkpoint
    from transformer_plugin.nn.convert import convert
    from transformer_plugin.nn.quantized_parameters import quantized_init
    from transformer_plugin.parallel import _sharding, clip_grad_norm_
    from transformer_plugin.support import explain_support
    from transformer_plugin.tensor import GroupedTensor, QuantizedTensor

    _on_import.on_import("torch.utils.flop_counter", _flops.register)
    _on_import.on_import("torch.distributed.tensor", _sharding.register)
    _on_import.on_import("torch.distributed.pipelining.stage", _pipelining.register)
    _on_import.on_import("torch._dynamo", _compiled.register)

    __all__ = [
        "GroupedTensor",
        "LaunchOptions",
        "QuantizedTensor",
        "__version__",
        "activations",
        "checkpoint",
        "clip_grad_norm_",
        "convert",
        "errors",
        "explain_support",
        "formats",
        "functional",
        "integrations",
        "nn",
        "ops",
        "optim",
        "parallel",
        "quantized_init",
        "recipes",
        *functional.__all__,
    ]

    _public.only_public_names(__name__)
