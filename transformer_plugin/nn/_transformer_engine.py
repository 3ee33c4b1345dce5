"""What modules take of TransformerEngine: names of entries in state dicts, and errors for its names of arguments.

The names are those of transformer_engine.pytorch 2.20.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from transformer_plugin._arguments import class_name
from transformer_plugin.recipes import DelayedScaling

_NO_OVERLAP = "Leave it out: there is no overlap with userbuffers"
_INITIAL = "Leave it out, and set the parameters with torch.nn.init afterwards"
_RANDOM = "Leave it out: ranks draw initial values of whole weights and keep their slices"
#: What to do in place of an argument that has another name here, or none. ``{}`` is a value.
ADVICE = {
    "params_dtype": "Pass dtype={}",
    "num_gemms": "Pass num_groups={}",
    "hidden_size": "Pass the size as the first argument",
    "zero_centered_gamma": "Pass zero_centered={}",
    "return_layernorm_output": "Pass return_normalized={}",
    "return_layernorm_output_gathered": "Leave it out: return_normalized=True returns this rank's rows",
    "parameters_split": "Leave it out: there is one parameter; sections=... says of which parts it consists",
    "tp_size": "Pass tp_group=..., which knows its size",
    "get_rng_state_tracker": _RANDOM,
    "rng_tracker_name": _RANDOM,
    "init_method": _INITIAL,
    "single_grouped_weight": 'Pass parameters="grouped", or "list" for a parameter of each group',
    "single_grouped_bias": 'Pass parameters="grouped", or "list" for a parameter of each group',
    "use_grouped_tensor": 'Pass parameters="grouped"',
    "ub_overlap_ag": _NO_OVERLAP,
    "ub_overlap_rs": _NO_OVERLAP,
    "ub_overlap_rs_dgrad": _NO_OVERLAP,
    "ub_bulk_dgrad": _NO_OVERLAP,
    "ub_bulk_wgrad": _NO_OVERLAP,
    "ub_name": _NO_OVERLAP,
    "symmetric_ar_type": "Leave it out: reductions are NCCL's",
    # of GroupedLinear, which alone does not have it
    "sequence_parallel": "Leave it out: a dispatch divides the rows of experts",
    "name": "Leave it out: errors name a layer by its place in the model",
    # of a forward
    "inp": "Pass the input as the first argument",
    "m_splits": "Pass group_sizes={}",
    "is_first_microbatch": "Make the layer with cache_weights=True, or call quantize_weights({}) before the forward",
    "fp8_output": "Leave it out: outputs are not quantized",
    "fp8_grad": "Leave it out: gradients of inputs are not quantized",
}


def refuse_names(module: torch.nn.Module, function: Any, given: dict[str, Any]) -> None:
    """Raises for the first argument that ``function`` does not have, but TransformerEngine does."""
    known = inspect.signature(function).parameters
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    for name, value in given.items():
        if name in ADVICE and name not in known:
            text = ADVICE[name].format("..." if isinstance(value, Tensor) else repr(value))
            other = text.removeprefix("Pass ").partition("={")[0].partition("=")[0]
            is_name = text.startswith("Pass ") and other.isidentifier()
            if is_name and other not in known and not passes_on:
                continue  # another layer's: Python's own error says more
            raise TypeError(
                f"transformer_plugin::{class_name(module)}: argument '{name}': expected the names of this package, got "
                f"TransformerEngine's. {text}."
            )


def drop_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Before ``load_state_dict``: takes TransformerEngine's ``_extra_state`` out of a state, unless the module has one.

    It has the recipe and, of delayed scaling, scales and histories of amaxes, which are not converted.
    """
    key = f"{prefix}_extra_state"
    if key not in state or type(module).set_extra_state is not torch.nn.Module.set_extra_state:
        return
    value = state.pop(key)
    is_empty = value is None or (isinstance(value, Tensor) and value.numel() == 0)
    if not is_empty and isinstance(getattr(module, "recipe", None), DelayedScaling):
        warnings.warn(
            f"transformer_plugin.nn.{class_name(module)}: '{key}' of TransformerEngine is not loaded: the scales of "
            "delayed scaling begin anew, and settle within the history of the first steps.",
            UserWarning,
            stacklevel=4,
        )


def rename(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, names: dict[str, str], errors: list[str]
) -> None:
    """Before ``load_state_dict``: gives entries of a state the names that the module has. Two for one are an error, as
    where ``torch.distributed.checkpoint`` adds the module's own entries (``full_state_dict=True``)."""
    for old, new in names.items():
        if prefix + old not in state or module._parameters.get(new) is None:
            continue
        if prefix + new in state:
            errors.append(
                f"'{prefix}{old}': expected one entry for a parameter, got '{prefix}{new}' too. Rename the first."
            )
            continue
        state[prefix + new] = state.pop(prefix + old)
