"""Low-precision and mixture-of-experts building blocks for PyTorch. Importing starts no CUDA context."""

from transformer_plugin import _library

_library.load()

from transformer_plugin import (  # noqa: E402
    _flops,
    _on_import,
    activations,
    errors,
    formats,
    functional,
    nn,
    ops,
    optim,
    parallel,
    recipes,
)
from transformer_plugin.functional import *  # noqa: E402, F403
from transformer_plugin.functional import _compiled  # noqa: E402
from transformer_plugin.launch import LaunchOptions  # noqa: E402
from transformer_plugin.nn import _pipelining  # noqa: E402
from transformer_plugin.nn.checkpoint import checkpoint  # noqa: E402
from transformer_plugin.nn.convert import convert  # noqa: E402
from transformer_plugin.nn.quantized_parameters import quantized_init  # noqa: E402
from transformer_plugin.parallel import _sharding, clip_grad_norm_  # noqa: E402
from transformer_plugin.support import explain_support  # noqa: E402
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor  # noqa: E402

_on_import.on_import("torch.utils.flop_counter", _flops.register)
_on_import.on_import("torch.distributed.tensor", _sharding.register)
_on_import.on_import("torch.distributed.pipelining.stage", _pipelining.register)
_on_import.on_import("torch._dynamo", _compiled.register)

__version__ = "0.1.0"
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
    "nn",
    "ops",
    "optim",
    "parallel",
    "quantized_init",
    "recipes",
    *functional.__all__,
]
